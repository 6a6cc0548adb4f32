"""What the records of a job say about its speed: where the time went, who held up whom, and what to do about it.

    steps        of each rank, how long the parts of its steps took
    blame        of what ranks have waited, how much was whose
    links        how fast messages went between two processes
    sending      how fast processes have sent, alone and to several others at once
    settings     what strategy has written the records
    calls        how to write a strategy with the settings that it is to have
    what_if      what the simulation expects of changes
    predictions  what the timing models expect of other settings, where the job cannot be simulated
    findings     the rules, and what they say
    live         what can be said of a running job without records
    page         the same with pictures, for a browser

`docs/see.md` shows how to read it.
"""

from hop_tf.tools.diagnosis.findings import Diagnosis, Finding, diagnose
from hop_tf.tools.diagnosis.live import diagnose_reports
from hop_tf.tools.diagnosis.page import make_page
from hop_tf.tools.diagnosis.what_if import Change

__all__ = ["Change", "Diagnosis", "Finding", "diagnose", "diagnose_reports", "make_page"]

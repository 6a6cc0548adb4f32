"""Diagnosis of a job's speed from its records: where the time went, which rank delayed which, and what to do about it.

    steps        the durations of the parts of each rank's steps
    blame        the causes of each rank's waits
    links        the speed of messages between two processes
    sending      the rates at which processes send, to one or to several others at once
    settings     the strategy that has written the records
    calls        the text of calls that make a strategy with given settings
    what_if      the expected effect of changes: by simulation, or by a timing model
    findings     the rules, and their results as text
    live         the diagnosis of a running job without records
    page         the diagnosis with pictures, for a browser

`docs/see.md` shows how to read it.
"""

from hop_tf.tools.diagnosis.findings import Diagnosis, Finding, diagnose
from hop_tf.tools.diagnosis.live import diagnose_reports
from hop_tf.tools.diagnosis.page import make_page
from hop_tf.tools.diagnosis.what_if import Change

__all__ = ["Change", "Diagnosis", "Finding", "diagnose", "diagnose_reports", "make_page"]

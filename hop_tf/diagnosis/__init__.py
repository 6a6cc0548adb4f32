"""What the records of a job say about its speed: where the time went, who held up whom, and what to do about it.

    steps        of each rank, how long the parts of its steps took
    blame        of what ranks have waited, how much was whose
    links        how fast messages went between two processes
    predictions  what the timing models expect of other settings
    findings     the rules, and what they say

`docs/see.md` shows how to read it.
"""

from hop_tf.diagnosis.findings import Diagnosis, Finding, diagnose

__all__ = ["Diagnosis", "Finding", "diagnose"]

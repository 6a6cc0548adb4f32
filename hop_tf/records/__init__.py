"""Records of every rank: events in files, and one timeline of all ranks.

    sampling   chooses the steps to record: the same steps on all ranks
    events     the format of events, and the meaning of their kinds
    recorder   writes a rank's events to its files
    clocks     the offsets between the clocks of machines
    log        reads the files of a job again, on one clock
    timeline   writes a trace that Perfetto and chrome://tracing open

`docs/see.md` describes the contents of the files.
"""

from hop_tf.records.events import Kind
from hop_tf.records.recorder import Recorder, make_recorder, recorded

__all__ = ["Kind", "Recorder", "make_recorder", "recorded"]

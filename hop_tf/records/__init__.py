"""What every rank did and when: events in files, and one timeline of all ranks.

    sampling   which steps are recorded: the same ones on all ranks
    events     what an event holds, and what its kinds mean
    recorder   a rank's events on their way to its files
    clocks     how far the clocks of machines are apart
    log        the files of a job, read again, on one clock
    timeline   the same as a trace that Perfetto and chrome://tracing open

`docs/see.md` says what the files hold.
"""

from hop_tf.records.events import Kind
from hop_tf.records.recorder import Recorder, make_recorder, recorded

__all__ = ["Kind", "Recorder", "make_recorder", "recorded"]

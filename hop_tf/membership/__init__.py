"""Who takes part in the running session, and where a rank waits for others.

A *session* is one call of `fit` (or the life of a custom training loop). Ranks enter it together: each announces that
it is ready and waits for the peers it deals with. They leave it one by one, when their `fit` ends, normally or not;
the announcement is passed on by everyone, so that it reaches the ranks that are no peers of the leaver too. The others
go on without a rank that left. When a rank was lost (it died, or cannot be reached), those that notice tell the others;
whether they then go on without it or all raise, a scheme decides. When a rank gave up or disagreed (an *abort*), all
raise.

A rank that was lost or has ended can be started again. Its new process is told that a session is under way; how it
joins that one is in `hop_tf.runtime.joining`. Here, every new process that joins is one more *incarnation* of the rank,
so that late news of an earlier one do no harm.
"""

from hop_tf.membership.departures import Departure
from hop_tf.membership.monitor import Monitor, ThreadMonitor
from hop_tf.membership.session import LEAVE_QUEUE, Membership, parse, tree_neighbors
from hop_tf.membership.session_queue import SessionQueue
from hop_tf.membership.silence import Silence
from hop_tf.membership.waiting import Interrupted, LeftBehind

__all__ = [
    "LEAVE_QUEUE",
    "Departure",
    "Interrupted",
    "LeftBehind",
    "Membership",
    "Monitor",
    "SessionQueue",
    "Silence",
    "ThreadMonitor",
    "parse",
    "tree_neighbors",
]

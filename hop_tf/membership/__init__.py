"""The ranks that take part in the running session, and waiting for them.

A *session* is one call of `fit` (or the life of a custom training loop). Ranks enter it together: each rank announces
that it is ready, and waits for its peers. Ranks leave it one by one, when their `fit` ends, normally or not. Every rank
passes such an announcement on, so that ranks that are no peers of the leaving rank hear of it, too. The others go on
without a rank that has left. When a rank is lost (it died, or cannot be reached), the ranks that notice tell the
others. The scheme decides if the others go on without the lost rank, or if all raise. When a rank gives up or disagrees
(an *abort*), all raise.

A rank that was lost or has exited can be started again. Its new process is told that a session is running, and joins it
as `hop_tf.runtime.joining` describes. Every new process that joins is a further *incarnation* of the rank. Late news of
an earlier incarnation is ignored.
"""

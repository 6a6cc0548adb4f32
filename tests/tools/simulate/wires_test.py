"""Compares the times at which messages that share a card have left with closed forms."""

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf.tools.simulate.scheduler import Scheduler
from hop_tf.tools.simulate.wires import Sending, Wires


def _run(*messages, stop_at=None):
    """Returns the start and end of each message, given as (time, peer, seconds of the link, seconds of the card)."""
    scheduler, times = Scheduler(), [[None, None] for _ in messages]
    number = {}
    wires = Wires(
        scheduler,
        lambda sending: times[number[sending]].__setitem__(0, scheduler.now),
        lambda sending: times[number[sending]].__setitem__(1, scheduler.now),
    )
    for place, (time, peer, seconds, card_seconds) in enumerate(messages):
        sending = Sending(None, peer, 0, 1, time, seconds, card_seconds)
        number[sending] = place
        scheduler.call_at(time, lambda sending=sending: wires.put(sending))
    if stop_at is not None:
        scheduler.call_at(stop_at, wires.stop)
    scheduler.run()
    return times


class WiresTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("one after the other to a peer", [(0, 1, 2, 0), (0, 1, 3, 0), (1, 2, 1, 0)], [2, 5, 2]),
        ("alike", [(0, 1, 0, 1), (0, 2, 0, 1), (0, 3, 0, 1)], [3, 3, 3]),
        # The shorter one has a half, then the longer one has all.
        ("of two lengths", [(0, 1, 0, 1), (0, 2, 0, 2)], [2, 3]),
        # Alone for a second; then both have a half.
        ("one that comes later", [(0, 1, 0, 2), (1, 2, 0, 2)], [3, 4]),
        # The first link takes a fifth of the card, and the other two have two fifths each.
        ("a slow link", [(0, 1, 5, 1), (0, 2, 0, 1), (0, 3, 0, 1)], [5, 2.5, 2.5]),
        # What waits behind a slow link leaves the card to others.
        ("behind a slow link", [(0, 1, 10, 1), (0, 1, 10, 1), (0, 2, 0, 9)], [10, 20, 10]),
        ("links that bind", [(0, 1, 4, 1), (0, 2, 4, 1)], [4, 4]),
        ("beside the card", [(0, 1, 0, 1), (0, 2, 1, 0), (0, 3, 0, 0)], [1, 1, 0]),
    )
    def test_when_messages_have_left(self, messages, ends):
        np.testing.assert_allclose([end for _, end in _run(*messages)], ends, rtol=1e-6)

    def test_what_has_not_begun_to_leave_never_does(self):
        begun, waiting = _run((0, 1, 0, 2), (0, 1, 0, 1), stop_at=1)
        self.assertEqual(begun, [0, 2])
        self.assertEqual(waiting, [None, None])

    def test_many_at_random(self):
        """Whatever comes, the card is never idle while there is something to send, and all links are as fast."""
        generator = np.random.default_rng(0)
        draws = generator.uniform(0, (5, 6, 1), (60, 3))
        messages = [(time, int(peer), 0, seconds) for time, peer, seconds in draws]
        ends = [end for _, end in _run(*messages)]
        until = 0.0
        for time, _, _, seconds in sorted(messages):
            until = max(until, time) + seconds
        self.assertAlmostEqual(max(ends), until, places=6)


if __name__ == "__main__":
    absltest.main()

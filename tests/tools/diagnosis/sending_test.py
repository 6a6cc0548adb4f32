"""Rates of cards and of links, from messages whose times are known."""

import itertools

from absl.testing import absltest, parameterized

from hop_tf.records.log import JobLog, Transfer
from hop_tf.tools.diagnosis.links import measure_links
from hop_tf.tools.diagnosis.sending import lone_rates, sending_rates

_BYTES = 1_000_000
_SLOW = 10.0


def _job(*messages):
    """Of process 0: (receiver, begin, end) of messages, again every 100 seconds."""
    numbers = itertools.count(1)
    transfers = [
        Transfer(
            sender=0,
            receiver=receiver,
            lane=1,
            number=next(numbers),
            queue="",
            num_bytes=_BYTES,
            session=1,
            step=turn,
            put_at=100.0 * turn + begin,
            sent_at=100.0 * turn + begin,
            come_at=100.0 * turn + end,
        )
        for turn in range(10)
        for receiver, begin, end in messages
    ]
    return JobLog([], sorted(transfers, key=lambda each: each.come_at), 0)


class SendingTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("one after the other", [(1, 0, 1), (2, 5, 6)], 1.0, {1: 1.0, 2: 1.0}),
        ("all at once", [(1, 0, 3), (2, 0, 3), (3, 0, 3)], 1.0, {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
        ("links of their own", [(1, 0, 1), (2, 0, 1), (3, 0, 1)], 3.0, {1: 1.0, 2: 1.0, 3: 1.0}),
        # The others tell what the card carries.
        ("a slow link", [(1, 0, 1), (2, 0, 1), (3, 0, _SLOW)], 2.0, {1: 1.0, 2: 1.0, 3: 1 / _SLOW}),
        # Each has the card alone for one second, and shares it for two: the whole is 3 seconds, of two messages.
        ("half of the time", [(1, 0, 2), (2, 1, 3)], 2 / 3, {1: 0.5, 2: 0.5}),
        # The link to 1 has the card alone in every second message.
        ("alone now and then", [(1, 0, 2), (2, 0, 2), (1, 5, 6)], 1.0, {1: 1.0, 2: 0.5}),
        # On its way while the one before it still was: it takes the link when that has come.
        ("behind another one", [(1, 0, 1), (1, 0, 2)], 1.0, {1: 1.0}),
    )
    def test_rates(self, messages, card, links):
        """In messages per second."""
        job = _job(*messages)
        measured = measure_links(job)
        self.assertAlmostEqual(sending_rates(job, measured)[0] / _BYTES, card, places=6)
        found = lone_rates(job, measured)
        self.assertEqual(found.keys(), {(0, receiver) for receiver in links})
        for receiver, rate in links.items():
            self.assertAlmostEqual(found[0, receiver] / _BYTES, rate, places=6)


if __name__ == "__main__":
    absltest.main()

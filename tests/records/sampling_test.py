"""Tests of the choice of steps that are recorded."""

from absl.testing import absltest, parameterized

from hop_tf.records import sampling


class SamplingTest(parameterized.TestCase):
    def test_all_at_first_then_every_second_block_then_every_fourth(self):
        for step in (-1, 0, 1, 1023):
            self.assertTrue(sampling.is_recorded(step))
        blocks = {step // 32 for step in range(1024, 2048) if sampling.is_recorded(step)}
        self.assertEqual(blocks, set(range(32, 64, 2)))
        blocks = {step // 32 for step in range(2048, 4096) if sampling.is_recorded(step)}
        self.assertEqual(blocks, set(range(64, 128, 4)))

    def test_blocks_are_whole(self):
        recorded = [step for step in range(20_000) if sampling.is_recorded(step)]
        self.assertTrue(all(step - step % 32 + place in recorded for step in recorded[::97] for place in (0, 31)))

    @parameterized.parameters((1, 1), (1024, 1024), (1025, 1536), (2048, 1536), (5000, 2560), (1_000_000, 6144))
    def test_their_number(self, count, most):
        """F + F/2 for each time that the number of steps has doubled since F; 6,144 of a million."""
        number = sum(sampling.is_recorded(step) for step in range(count))
        self.assertLessEqual(number, most)
        self.assertGreaterEqual(number, min(count, 1024))

    def test_sessions(self):
        recorded = [session for session in range(1, 100) if sampling.is_recorded_session(session)]
        self.assertEqual(recorded[:12], [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15])
        self.assertLen(recorded, 8 + 4 + 4 + 4 + 3)  # Below 8, 16, 32, 64 and 99.


if __name__ == "__main__":
    absltest.main()

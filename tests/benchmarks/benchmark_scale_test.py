"""`benchmarks/benchmark_scale.py`: the protocols of few ranks, and the closed forms."""

import pathlib
import tempfile

import benchmark_scale
import results
import tensorflow as tf
from absl import flags
from absl.testing import flagsaver


class ScaleTest(tf.test.TestCase):
    def test_messages_are_those_of_the_closed_forms(self):
        flags.FLAGS.mark_as_parsed()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        with flagsaver.flagsaver((results.OUTPUT, folder), smallest=2, largest=4, num_values=64):
            benchmark_scale.main(None)
        noted = {(case, title): value for title, case, (value,) in results.noted(pathlib.Path(folder))}
        cases = sorted({case for case, _ in noted})
        self.assertLen(cases, 18)
        for case in cases:
            # Under Canary, a sum in flight may count in the next step.
            tolerance = 0.25 if "canary" in case else 0.0
            self.assertAllClose(noted[case, "messages"], noted[case, "law"], rtol=tolerance, msg=case)
            self.assertEqual(noted[case, "fds"], 12 + 10 * noted[case, "peers"])


if __name__ == "__main__":
    tf.test.main()

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
        with flagsaver.flagsaver((results.OUTPUT, folder), smallest=2, largest=4):
            benchmark_scale.main(None)
        noted = {(case, title): value for title, case, (value,) in results.kept(pathlib.Path(folder))}
        cases = sorted({case for case, _ in noted})
        self.assertLen(cases, 14)
        for case in cases:
            self.assertEqual(noted[case, "messages"], noted[case, "law"], case)


if __name__ == "__main__":
    tf.test.main()

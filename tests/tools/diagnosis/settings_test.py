"""Settings that strategies have recorded are read as they were."""

import dataclasses

from absl.testing import absltest, parameterized

from hop_tf import codecs
from hop_tf.arguments import describe_batch_shares, identity_of
from hop_tf.strategies.dts.exchange import DTSSettings
from hop_tf.strategies.hop.settings import HopSettings, SkipIterations
from hop_tf.strategies.pipe_sgd.exchange import PipeSGDSettings
from hop_tf.tools.diagnosis.settings import read_settings


class SettingsTest(parameterized.TestCase):
    @parameterized.parameters(
        PipeSGDSettings(pipeline_width=2, codec=codecs.get("int8"), algorithm="ring"),
        PipeSGDSettings(pipeline_width=1, codec=codecs.TopK(ratio=0.1, error_feedback=True)),
        DTSSettings(delay=4, interval=8, codec=codecs.get(None), algorithm="mesh"),
        HopSettings(num_backup_workers=[1, 0, 1], skip=SkipIterations(max_jump=5), max_staleness=3),
        HopSettings(update_order="serial"),
    )
    def test_what_is_written_is_read(self, settings):
        read = read_settings({"settings": identity_of(settings)})
        read.pop("outer_optimizer", None)  # A description.
        names = [each.name for each in dataclasses.fields(settings) if each.name != "outer_optimizer"]
        self.assertEqual(read, {name: getattr(settings, name) for name in names})

    def test_a_topology_and_shares(self):
        shares = {"batch_shares": describe_batch_shares((3, 1))}
        read = read_settings({"settings": {"topology": "ring_based 0123456789abcdef", **shares}})
        self.assertEqual(read, {"topology": "ring_based", "batch_shares": (3, 1)})

    @parameterized.parameters(
        "mixing", "f(x=1)", "1 +", "None.x", "[*a]", "{[]: 1}", "TopK(size=1)", "TopK(ratio=5)", "Codec()"
    )
    def test_what_is_no_value_stays_text(self, text):
        self.assertEqual(read_settings({"settings": {"name": text}}), {"name": text})

    def test_records_without_settings(self):
        self.assertIsNone(read_settings({"strategy": "HopStrategy"}))


if __name__ == "__main__":
    absltest.main()

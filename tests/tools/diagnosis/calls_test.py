"""Calls that `diagnose` tells: they can be pasted, and keep what the records tell of the strategy."""

from unittest import mock

from absl.testing import absltest, parameterized

import hop_tf
from hop_tf import codecs
from hop_tf.records import make_recorder
from hop_tf.strategies.hop.settings import SkipIterations
from hop_tf.tools.diagnosis.calls import kept_settings, tell_call
from hop_tf.tools.diagnosis.settings import read_settings

_HOP, _PIPE_SGD, _DTS, _CANARY = "HopStrategy", "PipeSGDStrategy", "DTSStrategy", "CanaryStrategy"
_OF_ALL = {"on_peer_loss": "continue", "batch_shares": [3, 1]}


def _recorded(call):
    """The settings that the strategy of a call records, as they are read."""
    about = {}

    def make(folder, **given):
        about.update(given)
        return make_recorder(None)

    config = '{"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker", "index": 0}}'
    patches = {"make_recorder": make, "RankRuntime": mock.MagicMock(), "register_cluster": mock.Mock()}
    with mock.patch.multiple("hop_tf.strategy", **patches), mock.patch.dict("os.environ", {"TF_CONFIG": config}):
        call()
    return read_settings(about)


class CallsTest(parameterized.TestCase):
    @parameterized.parameters(
        (_HOP, {}),
        (
            _HOP,
            {
                "topology": "complete",
                "max_iteration_gap": 5,
                "num_backup_workers": 1,
                "skip": SkipIterations(),
                **_OF_ALL,
            },
        ),
        (_HOP, {"topology": "ring", "update_order": "serial", "on_peer_loss": "raise"}),
        (_HOP, {"skewed_shards": True}),
        (_PIPE_SGD, {}),
        (_PIPE_SGD, {"pipeline_width": 3, "codec": "int8", "num_segments": 2, "algorithm": "ring", **_OF_ALL}),
        (_PIPE_SGD, {"codec": None, "algorithm": "mesh"}),
        (
            _PIPE_SGD,
            {
                "pipeline_width": 2,
                "compensation": "none",
                "warmup_steps": 5,
                "codec": codecs.TopK(ratio=0.1, error_feedback=True),
            },
        ),
        (_CANARY, {"consistency": "bsp"}),
        (_CANARY, {"consistency": "bsp", "algorithm": "ring"}),
        (_DTS, {}),
        (_DTS, {"delay": 8, "interval": 4, "compensation": "eager", "skewed_shards": True}),
        (_DTS, {"delay": 4, "interval": 4, "compensation": "momentum", "warmup_steps": 9}),
        (_DTS, {"delay": 8, "interval": 2, "codec": "truncate16", "batch_shares": "auto"}),
    )
    def test_what_was_given_is_told_and_nothing_else(self, strategy, arguments):
        read = _recorded(lambda: getattr(hop_tf, strategy)(**arguments))
        kept = kept_settings(strategy, read, strategy)
        self.assertEqual(set(kept), set(arguments))
        text = tell_call(strategy, kept)
        self.assertEqual(_recorded(lambda: eval(text, {"hop_tf": hop_tf})), read, text)

    def test_what_another_strategy_has_is_kept(self):
        read = _recorded(lambda: hop_tf.PipeSGDStrategy(pipeline_width=3, codec="int8", **_OF_ALL))
        self.assertEqual(kept_settings(_PIPE_SGD, read, _HOP), {"on_peer_loss": "continue", "batch_shares": (3, 1)})
        self.assertEqual(set(kept_settings(_PIPE_SGD, read, _DTS)), {"on_peer_loss", "batch_shares", "codec"})
        # Hop with backup workers goes on where Pipe-SGD raises an error, by default.
        self.assertEmpty(kept_settings(_PIPE_SGD, _recorded(hop_tf.PipeSGDStrategy), _HOP))

    def test_of_a_strategy_of_the_users_own_nothing_is_known(self):
        self.assertEmpty(kept_settings("LocalSGDStrategy", {"codec": codecs.Int8(), "period": 4}, _PIPE_SGD))

    def test_the_text_of_a_change(self):
        read = _recorded(lambda: hop_tf.HopStrategy(topology="ring", max_iteration_gap=5))
        change = {"num_backup_workers": 1, "skip": SkipIterations(max_jump=5)}
        self.assertEqual(
            tell_call(_HOP, kept_settings(_HOP, read, _HOP) | change),
            "hop_tf.HopStrategy(topology='ring', max_iteration_gap=5, num_backup_workers=1, "
            "skip=hop_tf.SkipIterations(max_jump=5))",
        )

    def test_what_is_a_description_is_left_to_the_reader(self):
        settings = {"delay": 16, "outer_optimizer": "SGD(learning_rate=0.7)"}
        self.assertEqual(tell_call(_DTS, settings), "hop_tf.DTSStrategy(delay=16, outer_optimizer=...)")


if __name__ == "__main__":
    absltest.main()

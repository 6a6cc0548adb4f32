"""`Autotuner`: its choices on links and for computations whose times are given, on all ranks alike."""

import dataclasses
from collections.abc import Callable

import numpy as np
from absl.testing import absltest, parameterized

from hop_tf import codecs
from hop_tf.runtime.autotuning import Autotuner, Pace, Setting, Times
from hop_tf.runtime.choosing import choose
from hop_tf.runtime.ways import Way

_WAYS = [
    Way("mesh", codecs.Identity()),
    Way("ring", codecs.Identity()),
    Way("mesh", codecs.Int8()),
    Way("ring", codecs.Int8()),
]
_MESH, _RING, _INT8, _INT8_RING = range(4)
_WIDTHS = (1, 2)


@dataclasses.dataclass
class _World:
    """Ranks in lock step whose steps take what is said here, give or take a tenth.

    Attributes:
      computing: Seconds that a step computes.
      sending: Seconds of an all-reduce, for each way.
      interval_of: As of `Autotuner`.
    """

    computing: float
    sending: tuple[float, ...]
    interval_of: Callable[[int], int] = lambda width: 1

    def __post_init__(self):
        self.random = np.random.default_rng(3)
        self.tuners = {}
        self.told = []
        self.settings = []  # Of each step.
        self._times = {}

    def begin(self, num_ranks=3, widths=_WIDTHS, tracing=0.0, **arguments):
        self.tuners = {rank: self._make(rank, num_ranks, widths, **arguments) for rank in range(num_ranks)}
        self._times = dict.fromkeys(range(num_ranks), Times(tracing, 0.0))
        return self

    def begin_again(self):
        for tuner in self.tuners.values():
            tuner.begin(tuner.setting.width)

    def _make(self, rank, num_ranks, widths, ways=_WAYS, **arguments):
        tell = lambda way, width, text: self.told.append(text) if rank == 0 else None  # noqa: E731
        arguments["interval_of"] = self.interval_of
        return Autotuner(ways, widths, rank=rank, world_size=num_ranks, tell=tell, **arguments)

    def step(self, number=1):
        for _ in range(number):
            (setting,) = {tuner.setting for tuner in self.tuners.values()}
            self.settings.append(setting)
            mean = np.mean([tuner.own(self._times[rank]) for rank, tuner in self.tuners.items()], axis=0)
            for rank, tuner in self.tuners.items():
                tuner.hear(mean.ravel(), self.settings[-2] if len(self.settings) > 1 else None)
                self._times[rank] = self._take(rank, setting)

    def _take(self, rank, setting):
        computing = self.computing * self.random.uniform(0.9, 1.1)
        sending = self.sending[setting.way] * self.random.uniform(0.95, 1.05)
        of_step = sending / self.interval_of(setting.width)
        period = computing + of_step if setting.width == 1 else max(computing, of_step)
        return Times(period, sending + self.random.uniform(0, 0.02) * (rank > 0))  # It has waited for rank 0.

    @property
    def setting(self):
        (setting,) = {tuner.setting for tuner in self.tuners.values()}
        return setting


class LowRankTest(parameterized.TestCase):
    """Factors, which take twice as many messages, are a third codec."""

    _FACTORS, _FACTORS_RING = 4, 5
    _ALL_WAYS = (*_WAYS, Way("mesh", codecs.LowRank()), Way("ring", codecs.LowRank()))

    @parameterized.parameters(((1,), False), ((1, 2), True))
    def test_int8_is_tried_if_a_wider_pipe_might_hide_it(self, widths, is_tried):
        """With a wider pipe, int8 would take 0.1 s. The factors take 0.11 s, or with a wider pipe 0.1 s, too."""
        world = _World(0.1, (0.3, 0.08, 0.01)).begin(widths=widths, ways=self._ALL_WAYS[::2])
        world.step(60)
        self.assertEqual(world.setting, Setting(2, 1))
        self.assertEqual(1 in {setting.way for setting in world.settings}, is_tried)

    @parameterized.parameters(
        # Links of 100 Mbit/s, and of 10: int8, or a ring, could not be better.
        (0.01, (0.26, 0.26, 0.08, 0.08, 0.015, 0.025), _FACTORS, {_MESH, _FACTORS, _FACTORS_RING}),
        (0.01, (2.7, 2.7, 0.7, 0.7, 0.07, 0.09), _FACTORS, {_MESH, _FACTORS, _FACTORS_RING}),
        # A link of 1 Gbit/s: factors take as long as int8.
        (0.01, (0.027, 0.027, 0.01, 0.012, 0.01, 0.012), _INT8, None),
        # A fast link.
        (0.01, (0.001, 0.001, 0.001, 0.001, 0.002, 0.002), _MESH, {_MESH}),
    )
    def test_chooses(self, computing, sending, expected, tried):
        world = _World(computing, sending).begin(widths=(1,), ways=self._ALL_WAYS)
        world.step(60)
        self.assertEqual(world.setting, Setting(expected, 1))
        if tried is not None:
            self.assertEqual({setting.way for setting in world.settings}, tried)


class WindowsTest(parameterized.TestCase):
    """Windows as long as the delay, as of DTS: D is one less than the width."""

    @parameterized.parameters(
        (0.1, (0.01, 0.01, 0.01, 0.01), Setting(_MESH, 1)),  # There is nothing to hide.
        (0.01, (0.1, 0.1, 0.03, 0.035), Setting(_INT8, 1 + 3)),
        (0.1, (0.1, 0.1, 0.09, 0.09), Setting(_MESH, 1 + 1)),
        (0.1, (0.5, 0.4, 0.4, 0.35), Setting(_RING, 1 + 4)),
    )
    def test_chooses_the_smallest_delay_that_hides_communication(self, computing, sending, expected):
        world = _World(computing, sending, self._interval_of).begin(widths=range(1, 22), traces=False)
        world.step(80)
        self.assertEqual(world.setting, expected)

    def test_no_delay_is_long_enough(self):
        """Among the longest ones, none saves 15 % more than the one that is chosen."""
        world = _World(0.01, (2.0, 2.0, 1.5, 1.6), self._interval_of).begin(widths=range(1, 22), traces=False)
        world.step(80)
        self.assertEqual(world.setting.way, _INT8)
        self.assertBetween(world.setting.width, 1 + 17, 1 + 20)

    def test_an_interval_that_is_given(self):
        """Ranks wait for windows of 5 steps, or go on meanwhile."""
        for sending, delay in (((0.06,) * 4, 0), ((0.4,) * 4, 5)):
            world = _World(0.1, sending, lambda width: 5).begin(widths=(1, 6), traces=False)
            world.step(60)
            self.assertEqual(world.setting, Setting(_MESH, 1 + delay))

    def test_a_link_becomes_slower_and_recovers(self):
        """Within 200 steps of training; a window has several."""
        world = _World(0.01, (0.02,) * 4, self._interval_of).begin(widths=range(1, 22), traces=False)
        world.step(100)
        self.assertEqual(world.setting, Setting(_MESH, 1 + 2))
        for sending, expected in (
            ((0.2, 0.2, 0.05, 0.06), Setting(_INT8, 1 + 5)),
            ((0.02,) * 4, Setting(_MESH, 1 + 2)),
        ):
            world.sending = sending
            num_before, num_steps = len(world.settings), 0
            while num_steps < 200:
                world.step()
                num_steps += self._interval_of(world.settings[-1].width)
            self.assertLess(len(world.settings) - num_before, 150)
            self.assertEqual(world.setting, expected)

    def test_two_ranks_that_wait_in_turns(self):
        """One has begun 0.2 s later. In the next step it is the other one, and so on: waiting is no computing."""
        sending, later = 0.27, 0.2
        world = _World(0.05, (sending,) * 4, self._interval_of).begin(2, range(1, 22), traces=False)
        take = world._take

        def take_in_turns(rank, setting):
            if setting.width > 1:
                return take(rank, setting)
            exchange = sending + (later if (len(world.settings) + rank) % 2 else -later)
            return Times(world.computing + exchange, exchange)

        world._take = take_in_turns
        world.step(60)
        self.assertEqual(world.setting.way, _MESH)
        self.assertBetween(world.setting.width, 1 + 5, 1 + 6)

    @parameterized.parameters((1.4, 1 + 4), (0.7, 1 + 2))
    def test_a_change_that_is_not_by_far_needs_no_exploring(self, times_as_long, expected):
        world = _World(0.02, (0.2, 0.2, 0.06, 0.07), self._interval_of).begin(widths=range(1, 22), traces=False)
        world.step(60)
        self.assertEqual(world.setting, Setting(_INT8, 1 + 3))
        world.sending = tuple(times_as_long * seconds for seconds in world.sending)
        world.step(100)
        self.assertEqual(world.setting, Setting(_INT8, expected))
        self.assertEqual({setting.way for setting in world.settings[60:]}, {_INT8})
        self.assertNotIn(1, {setting.width for setting in world.settings[60:]})

    def test_exchanges_that_are_longer_if_ranks_wait_for_them(self):
        """A connection that was idle begins slowly. A small change does not make up for that with longer delays."""
        world = _World(0.02, (0.2, 0.2, 0.06, 0.06), self._interval_of).begin(widths=range(1, 22), traces=False)
        take = world._take

        def take_long(rank, setting):
            period, exchange = take(rank, setting)
            return Times(period + exchange, 2 * exchange) if setting.width == 1 else Times(period, exchange)

        world._take = take_long
        world.step(60)
        self.assertEqual(world.setting, Setting(_INT8, 1 + 6))
        world.sending = (0.3, 0.3, 0.09, 0.09)
        world.step(300)
        self.assertEqual(world.setting.way, _INT8)
        self.assertBetween(world.setting.width, 1 + 4, 1 + 6)

    @staticmethod
    def _interval_of(width):
        return max(1, width - 1)


class AutotunerTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("fast", 0.1, (0.01, 0.01, 0.01, 0.01), Setting(_MESH, 1)),
        ("next_to_nothing_to_win", 0.1, (0.017, 0.01, 0.005, 0.005), Setting(_MESH, 1)),
        ("slow", 0.01, (0.3, 0.25, 0.08, 0.079), Setting(_INT8, 1)),
        ("ring_is_faster", 0.01, (0.3, 0.2, 0.2, 0.18), Setting(_RING, 1)),
        ("ring_with_codec", 0.004, (0.3, 0.2, 0.1, 0.06), Setting(_INT8_RING, 1)),
        ("codec_is_slow", 0.01, (0.3, 0.3, 0.28, 0.29), Setting(_MESH, 1)),
        ("as_long_as_computing", 0.1, (0.1, 0.11, 0.095, 0.1), Setting(_MESH, 2)),
        ("codec_is_enough", 0.1, (0.1, 0.1, 0.012, 0.02), Setting(_INT8, 1)),
        ("both", 0.1, (0.4, 0.4, 0.1, 0.1), Setting(_INT8, 2)),
    )
    def test_chooses(self, computing, sending, expected):
        world = _World(computing, sending).begin()
        world.step(80)
        self.assertEqual(world.setting, expected)
        self.assertLen(world.told, 1)
        self.assertEqual(len(set(world.settings[-20:])), 1)

    def test_explores_for_few_steps(self):
        fast = _World(0.1, (0.01,) * 4).begin()
        fast.step(60)
        self.assertEqual({setting.way for setting in fast.settings}, {_MESH})
        slow = _World(0.1, (0.4, 0.4, 0.1, 0.1)).begin()
        slow.step(60)
        first = slow.settings.index(slow.setting)
        self.assertLess(first, 40)

    @parameterized.product(
        case=[
            (0.05, (0.03, 0.03, 0.008, 0.008), _INT8),
            (0.1, (0.05, 0.05, 0.013, 0.013), _INT8),
            (0.02, (0.24, 0.25, 0.06, 0.06), _INT8),
            (0.1, (0.3, 0.3, 0.28, 0.29), _MESH),
            (0.02, (0.24, 0.25, 0.22, 0.22), _MESH),
        ],
        step=[1, 2, 3, 4],
        seconds=[0.2, 0.5, 1.0],
        of_exchange=[True, False],
    )
    def test_one_slow_step_decides_nothing(self, case, step, seconds, of_exchange):
        """A step that the data hold up, or a packet that is sent again, when the program has just begun."""
        computing, sending, way = case
        world = _World(computing, sending).begin(widths=(1,))
        take = world._take

        def slow(rank, setting):
            period, exchange = take(rank, setting)
            is_slow = len(world.settings) == step
            return Times(period + seconds * is_slow, exchange + seconds * (is_slow and of_exchange))

        world._take = slow
        world.step(120)
        self.assertEqual(world.setting, Setting(way, 1))

    def test_makes_few_steps_that_are_slower_by_far(self):
        """Three without a codec: the first one, one whose times it tells, and one that tells the second one's."""
        world = _World(0.02, (0.24, 0.25, 0.06, 0.06)).begin(tracing=1.0)
        world.step(124)
        self.assertEqual(world.setting, Setting(_INT8, 1))
        self.assertLen([setting for setting in world.settings if setting.way in (_MESH, _RING)], 3)
        self.assertEqual({setting.width for setting in world.settings}, {1})

    def test_tries_a_wide_pipe_when_it_would_have_saved_what_tracing_takes(self):
        """Tracing takes 10 s, and a wide pipe saves 0.1 s of 0.2 s, which is 0.07 s more than it has to save."""
        world = _World(0.1, (0.1, 0.11, 0.095, 0.1)).begin(tracing=10.0 / 3)
        world.step(200)
        first_wide = next(number for number, setting in enumerate(world.settings) if setting.width == 2)
        self.assertBetween(first_wide, 130, 190)
        self.assertEqual(world.setting, Setting(_MESH, 2))
        self.assertLen(world.told, 2)
        never = _World(0.1, (0.1, 0.11, 0.095, 0.1)).begin(tracing=1000.0)
        never.step(500)
        self.assertEqual({setting.width for setting in never.settings}, {1})

    @parameterized.parameters({"widths": (1,)}, {"tracing": 1e6})
    def test_a_program_that_is_slow_at_first(self, **arguments):
        """The candidate that is tried first has no disadvantage."""
        world = _World(0.1, (0.1, 0.1, 0.1, 0.1)).begin(**arguments)
        take = world._take

        def slow_at_first(rank, setting):
            growth = 1.5 if len(world.settings) < 20 else 1.0
            return Times(*(growth * seconds for seconds in take(rank, setting)))

        world._take = slow_at_first
        world.step(60)
        self.assertIn(Setting(_INT8, 1), world.settings)
        self.assertEqual(world.setting, Setting(_MESH, 1))

    def test_a_wide_pipe_is_kept_only_if_it_is_as_good_as_was_predicted(self):
        world = _World(0.1, (0.1, 0.1, 0.1, 0.1)).begin()
        take = world._take
        world._take = lambda rank, setting: take(rank, setting._replace(width=1))  # Nothing is hidden.
        world.step(60)
        # No other wide pipe is tried then.
        self.assertEqual({setting.way for setting in world.settings if setting.width == 2}, {_MESH})
        self.assertEqual(world.setting, Setting(_MESH, 1))

    @parameterized.parameters(
        ((2,), 0.1, (0.06, 0.06, 0.02, 0.02), Setting(_MESH, 2)),  # Hidden in any case.
        ((2,), 0.1, (0.4, 0.4, 0.1, 0.1), Setting(_INT8, 2)),
        ((1,), 0.1, (0.1, 0.1, 0.09, 0.09), Setting(_MESH, 1)),
    )
    def test_a_width_that_was_given_is_kept(self, widths, computing, sending, expected):
        world = _World(computing, sending).begin(widths=widths)
        world.step(60)
        self.assertEqual(world.setting, expected)
        self.assertEqual({setting.width for setting in world.settings}, set(widths))

    def test_a_link_becomes_slower_and_recovers(self):
        world = _World(0.01, (0.001,) * 4).begin()
        for number_before in (300, 1000):
            world.sending = (0.001,) * 4
            world.step(number_before)
            self.assertEqual(world.setting, Setting(_MESH, 1))
            world.sending = (0.5, 0.5, 0.15, 0.15)
            world.step(200)
            self.assertEqual(world.setting, Setting(_INT8, 1))
        world.sending = (0.001,) * 4
        world.step(200)
        self.assertEqual(world.setting, Setting(_MESH, 1))

    def test_a_link_recovers_that_a_codec_has_made_short(self):
        """Encoded exchanges are a tenth of a step, and less when the link is fast again."""
        world = _World(0.1, (0.1, 0.1, 0.01, 0.01)).begin(widths=(1,))
        world.step(100)
        self.assertEqual(world.setting, Setting(_INT8, 1))
        world.sending = (0.01, 0.01, 0.001, 0.001)
        world.step(200)
        self.assertEqual(world.setting, Setting(_MESH, 1))

    def test_explores_seldom(self):
        """Of a link that changes all the time, too."""
        world = _World(0.1, (0.5, 0.5, 0.15, 0.15)).begin()
        for number in range(400):
            world.sending = ((0.01,) * 4, (0.5, 0.5, 0.15, 0.15))[number % 2]
            world.step(50)
        tuner = world.tuners[0]
        self.assertLess(tuner._num_explored, 100 + 0.01 * 20_000 + 40)

    def test_does_not_explore_again_for_nothing(self):
        world = _World(0.1, (0.5, 0.5, 0.15, 0.15)).begin()
        world.step(2000)
        self.assertLen(world.told, 1)

    def test_the_next_session_begins_with_what_the_first_rank_has_chosen(self):
        world = _World(0.01, (0.3, 0.25, 0.08, 0.08)).begin()
        world.step(60)
        world.tuners[1]._settled = None  # It has ended early.
        world.begin_again()
        world.step(3)
        self.assertEqual(world.settings[-3:], [Setting(_MESH, 1), *[Setting(_INT8, 1)] * 2])

    def test_explores_again_when_a_rank_has_left_and_when_one_joins(self):
        world = _World(0.01, (0.3, 0.25, 0.08, 0.08)).begin()
        for number_before in range(3, 60, 8):  # In the middle of exploring, and afterwards.
            world.begin()
            world.step(number_before)
            tuner = world.tuners.pop(1)
            world.sending = (0.001,) * 4
            world.step(60)
            self.assertEqual(world.setting, Setting(_MESH, 1))
            tuner.begin(1)
            tuner.take_state(world.tuners[0].state())
            world.tuners[1] = tuner
            world.sending = (0.3, 0.25, 0.08, 0.08)
            world.step(60)
            self.assertEqual(world.setting, Setting(_INT8, 1))
            states = {tuple(tuner.state()) for tuner in world.tuners.values()}
            self.assertLen(states, 1)

    def test_a_program_that_no_wide_pipe_can_follow(self):
        world = _World(0.1, (0.1, 0.11, 0.095, 0.1)).begin()
        world.tuners[2].is_narrow = True
        world.step(60)
        self.assertEqual({setting.width for setting in world.settings}, {1})
        world.tuners[2].is_narrow = False
        world.begin_again()
        world.tuners[0]._settled = Setting(_MESH, 2)
        world.step(10)
        self.assertEqual(world.setting.width, 2)
        world.tuners[1].is_narrow = True  # It turns out late.
        world.step()
        self.assertEqual(world.setting, Setting(_MESH, 1))

    def test_one_setting(self):
        world = _World(0.1, (0.1,)).begin(widths=(2,), ways=_WAYS[:1])
        world.step(50)
        self.assertEqual(world.setting, Setting(_MESH, 2))
        self.assertEmpty(world.told)

    def test_says_what_a_step_takes(self):
        world = _World(0.01, (0.3, 0.25, 0.08, 0.08)).begin(pace=Pace(measured=9))
        world.step(60)
        self.assertRegex(
            world.told[0], r"^int8 over a mesh, K = 1: (8|9)\d(\.\d)? ms a step; lossless over a mesh, K = 1: 3\d\d ms$"
        )


class ChooseTest(absltest.TestCase):
    def test_a_change_has_to_be_worth_it(self):
        seconds = {"lossless": 1.0, "lossless ring": 0.97, "int8": 0.86, "int8 ring": 0.84}
        self.assertEqual(choose(list(seconds), seconds.get, lambda name: "int8" in name), "int8 ring")
        seconds["int8 ring"] = 0.855
        self.assertEqual(choose(list(seconds), seconds.get, lambda name: "int8" in name), "lossless")
        seconds["lossless ring"] = 0.95
        self.assertEqual(choose(list(seconds), seconds.get, lambda name: "int8" in name), "lossless ring")


if __name__ == "__main__":
    absltest.main()

"""`WhatIf`: the time of a step with other settings, shares, ranks or links, by simulation.

The records tell the durations of each rank's own work in each step, and the speed of messages. The strategies' own
protocols then run with these on a virtual clock: see `hop_tf.simulate.training`. The simulation is trusted only if it
reproduces the recorded step with the job's settings, up to `MOST_ERROR`. Its relative error is assumed to be the same
for other settings:

    step  =  simulated step  *  recorded step / simulated step with the job's settings

If a job cannot be simulated, `WhatIf.recommend` asks the model of Pipe-SGD (`hop_tf.timing`).

Links may be faster than recorded: see `hop_tf.tools.diagnosis.sending`. So the expected effect of a change is more
often too small than too large.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from hop_tf import codecs
from hop_tf.arguments import checked_batch_shares
from hop_tf.errors import HopError
from hop_tf.records.log import JobLog
from hop_tf.tools.diagnosis.calls import kept_settings, tell_call
from hop_tf.tools.diagnosis.links import Link
from hop_tf.tools.diagnosis.sending import lone_rates, sending_rates
from hop_tf.tools.diagnosis.settings import read_settings, settings_in_effect
from hop_tf.tools.diagnosis.steps import Steps
from hop_tf.tools.timing import NetworkCosts, Plan, Step, recommend
from hop_tf.tools.timing.costs import FLOAT32_BYTES

# The largest relative error of the simulated step, with the job's settings, for which the simulation is trusted.
MOST_ERROR = 0.15
# A change must save at least this share of a step.
LEAST_GAIN = 0.05
# Kinds of findings that communication has caused.
OF_LINKS = ("bandwidth", "latency", "communication")
# The largest and smallest number of steps of a simulation, and the largest product of its steps and pairs of ranks.
# With many ranks, fewer steps are simulated, because each rank may send to all others. A simulation then takes a
# second.
_MOST_STEPS, _LEAST_STEPS, _MOST_PAIRS = 100, 25, 6400


@dataclasses.dataclass(frozen=True)
class Change:
    """A change, and its expected effect.

    Attributes:
      text: The call to write, such as "hop_tf.PipeSGDStrategy(codec='int8')", including settings that stay.
      strategy: Name of the strategy.
      settings: The arguments of the strategy.
      batch_shares: The part of a batch that each rank takes, or None for equal parts.
      step_seconds: The expected time of a step, the mean over steps and ranks. Skipped iterations count, too.
    """

    text: str
    strategy: str
    settings: Mapping[str, object]
    batch_shares: Sequence[float] | None = None
    step_seconds: float = math.nan


class WhatIf:
    """Simulates the job of some records with changes.

    Args:
      job: The records.
      steps: The steps of the ranks, by index in `JobLog.processes`.
      links: The links from `measure_links`.
      step_seconds: The recorded time of a step.

    Attributes:
      strategy: The job's strategy.
      given: The strategy's settings, as the program gave them, or None if they are not recorded.
      settings: The strategy's settings with the ranks' choices in place of "auto", or None.
      present: The recorded time of a step, with the job's settings: `step_seconds`.
    """

    def __init__(
        self, job: JobLog, steps: Mapping[int, Steps], links: Mapping[tuple[int, int], Link], step_seconds: float
    ):
        self._job = job
        self._steps = list(steps.values())
        self.present = step_seconds
        self._world_size = len(self._steps)
        self._places = {index: place for place, index in enumerate(steps)}
        self._measured = links
        self._links = {tuple(self._places.get(end) for end in ends): link for ends, link in links.items()}
        about = job.ranks[0].about
        self.strategy = str(about.get("strategy"))
        self.given = read_settings(about)
        self.settings = None if self.given is None else settings_in_effect(self.given, job.ranks[0].lines)
        self._num_values = sum(line["num_values"] for line in job.ranks[0].lines if line["kind"] == "group")
        # The maximum, because ranks that skip steps have made fewer.
        num_recorded = max(len(each.begin) for each in self._steps)
        self._num_steps = min(_MOST_STEPS, _MOST_PAIRS // self._world_size**2, num_recorded)
        self._num_processes = int(about["num_ranks"]) + int(about["num_servers"])

    @property
    def is_trusted(self) -> bool:
        """True if there is no `problem`."""
        return not self.problem

    @functools.cached_property
    def problem(self) -> str:
        """The reason that the job cannot be simulated, or that its simulation is not trusted. Empty if none."""
        if self.settings is None or not self._num_values:
            return "the records do not tell the strategy's settings"
        if self.strategy not in _candidates_of:
            return f"{self.strategy} is not simulated"
        if isinstance(self.settings.get("codec"), codecs.LowRank):
            return "a codec of low rank is not simulated"
        if not self._world_size == self._num_processes > 1:
            return f"steps of {self._world_size} processes are recorded, in a job of {self._num_processes}"
        if self._num_steps < _LEAST_STEPS:
            return f"too few steps are recorded, or there are too many ranks: {self._num_steps} would be simulated"
        try:
            share = self._simulated_present / self.present
        except (TypeError, ValueError) as error:  # For instance a topology without a name.
            return str(error)
        if abs(share - 1) > MOST_ERROR:
            return f"with the settings that the job has, a simulated step takes {share:.0%} of its time"
        return ""

    @functools.cached_property
    def _simulated_present(self) -> float:
        return self._simulate()

    def recommend(self) -> Plan | None:
        """The settings of `PipeSGDStrategy` with the shortest step, by the timing model.

        Returns None if too little is recorded. The model assumes that ranks are alike, encoding costs nothing, and no
        link is shared.
        """
        latency = _median([each.round_trip_seconds for each in self._measured.values()], math.nan) / 2
        rate = _median(list(sending_rates(self._job, self._measured).values()), math.nan)
        if not self._num_values or math.isnan(latency + rate):
            return None
        computing = float(np.median([np.mean(each.compute) for each in self._steps]))
        between = float(np.median([np.mean(each.own - each.compute) for each in self._steps]))
        return recommend(
            NetworkCosts(latency_seconds=latency, seconds_per_byte=1 / rate),
            Step.of_computing(computing, update_seconds=between),
            world_size=len({process.number for process in self._job.ranks}),
            num_bytes=FLOAT32_BYTES * self._num_values,
        )

    def expect(self, *arguments, **changed) -> float:
        """The time of a step with changes, which are arguments of `_simulate`.

        Returns nan if the simulation is not trusted, or the changes cannot be simulated.
        """
        if not self.is_trusted:
            return math.nan
        try:
            return self._simulate(*arguments, **changed) * self.present / self._simulated_present
        except ValueError:  # For instance if the job has too few ranks for the settings.
            return math.nan

    def like_others(self, index: int) -> float:
        """The time of a step if a rank's own work were like that of the others, each taken in turn.

        Returns nan if the simulation is not trusted.

        Args:
          index: The rank's index in `JobLog.processes`.
        """
        return self.expect(own_like_others=self._places[index])

    def with_links(self, slow: Sequence[Link], **known: float) -> float:
        """The time of a step if some links had another rate or latency. Returns nan if the simulation is not trusted.

        Args:
          slow: The links.
          **known: The assumed `bytes_per_second` or `round_trip_seconds` of these links.
        """
        return self.expect(links={tuple(self._places.get(end) for end in link.ends): known for link in slow})

    def changes(self, kinds: Sequence[tuple[str, bool]], most: int = 2) -> list[Change]:
        """Returns the changes that help most, the best first.

        Changes with about the same gain come in the order of `kinds`, and then of `_candidates_of`.

        Args:
          kinds: The findings: `Finding.kind`, and `is_always`.
          most: The most changes to return.
        """
        if not kinds or not self.is_trusted:
            return []
        found = [each for each in self._simulated(kinds) if each.step_seconds < (1 - LEAST_GAIN) * self.present]
        best: list[Change] = []
        while found and len(best) < most:
            shortest = min(change.step_seconds for change in found)
            chosen = next(change for change in found if change.step_seconds <= (1 + LEAST_GAIN) * shortest)
            best.append(chosen)
            # Further changes must differ in kind.
            found = [each for each in found if _way(each) != _way(chosen)]
        return best

    def _simulated(self, kinds: Sequence[tuple[str, bool]]) -> Iterator[Change]:
        """Simulates the candidates."""
        for kind, is_always in kinds:
            for change in self._candidates(kind, is_always):
                seconds = self.expect(change.strategy, change.settings, change.batch_shares)
                if math.isnan(seconds):
                    continue
                yield dataclasses.replace(change, step_seconds=seconds)
                if kind in OF_LINKS and seconds < (1 + LEAST_GAIN) * self._most_own:
                    break  # No communication is left to hide, and later candidates change training more.

    @functools.cached_property
    def _most_own(self) -> float:
        """The seconds of the slowest rank's own work in a step."""
        return max(float(np.mean(each.own)) for each in self._steps)

    def _candidates(self, kind: str, is_always: bool) -> Iterator[Change]:
        if kind == "compute" and is_always and self.settings.get("batch_shares") is None:
            yield self._with_shares()
        for strategy, settings in _candidates_of[self.strategy](kind, is_always, self.settings):
            if strategy != self.strategy or any(self.settings.get(k) != v for k, v in settings.items()):
                # The call names all settings, because ranks would choose omitted ones anew.
                whole = {**kept_settings(self.strategy, self.settings, strategy), **settings}
                yield Change(tell_call(strategy, whole), strategy, whole)

    def _with_shares(self) -> Change:
        speeds = np.array([1 / np.mean(each.compute) for each in self._steps])
        percents = np.maximum(1, np.round(100 * speeds / speeds.sum())).astype(int).tolist()
        shares = list(checked_batch_shares(percents, self._world_size))
        whole = {**kept_settings(self.strategy, self.given, self.strategy), "batch_shares": shares}
        return Change(tell_call(self.strategy, whole), self.strategy, self.settings, shares)

    def _simulate(
        self,
        strategy: str | None = None,
        settings: Mapping[str, object] | None = None,
        batch_shares: Sequence[float] | None = None,
        own_like_others: int | None = None,
        links: Mapping[tuple[int, int], Mapping[str, float]] | None = None,
    ) -> float:
        """The time of a simulated step.

        Args:
          strategy: Name of the strategy. Default: the job's.
          settings: Arguments of the strategy. Default: the job's.
          batch_shares: The part of a batch that each rank takes. Default: as in the job.
          own_like_others: A rank whose own work is like that of the others. Default: none.
          links: The changed values of links, by their ends. See `with_links`.

        Raises:
          ValueError: If the settings are not possible, or ranks fail or wait for ever.
        """
        from hop_tf.tools.simulate.scheduler import DeadlockError
        from hop_tf.tools.simulate.training import simulate_training

        strategy, settings = strategy or self.strategy, self.settings if settings is None else settings
        # Ranks send only once in a window of DTS or an iteration of Hop, so more steps are simulated. Their number is a
        # multiple of the recorded ones, so that all recorded steps count equally.
        interval = _interval(settings) if strategy == "DTSStrategy" else int(settings.get("interval", 1))
        num_rounds = math.ceil(_LEAST_STEPS * interval / self._num_steps)
        try:
            return simulate_training(
                strategy,
                settings,
                world_size=self._world_size,
                num_steps=num_rounds * self._num_steps,
                own=lambda rank: self._own(rank, batch_shares, own_like_others),
                links=self._all_links(links or {}),
                num_values=self._num_values,
            ).step_seconds
        except (DeadlockError, HopError) as error:
            raise ValueError(f"the simulation of {strategy} fails: {error}") from error

    def _own(self, rank: int, batch_shares: Sequence[float] | None, own_like_others: int | None) -> Iterator:
        """Yields the rank's own work in its last recorded steps, one by one, in an endless cycle."""
        from hop_tf.tools.simulate.rank_loops import OwnSeconds

        times_equal = 1.0 if batch_shares is None else batch_shares[rank] / np.mean(batch_shares)
        others = [other for other in range(self._world_size) if other != rank]
        for number in itertools.count():
            of_rank = rank if rank != own_like_others else others[number % len(others)]
            steps = self._steps[of_rank]
            first = max(0, len(steps.begin) - self._num_steps)
            step = first + number % (len(steps.begin) - first)
            yield OwnSeconds(
                compute=float(steps.compute[step]) * times_equal,
                input=float(steps.input[step]),
                update=float(steps.other[step]),
                callbacks=float(steps.callbacks[step] + steps.validation[step]),
            )

    def _all_links(self, changed: Mapping[tuple[int, int], Mapping[str, float]]):
        """All links and the cards of all ranks. Links and cards without messages get the median of the others."""
        from hop_tf.tools.simulate.training import Links

        shape = (self._world_size, self._world_size)
        latency = np.full(shape, _median([each.round_trip_seconds for each in self._links.values()], 0.0) / 2)
        rate = np.full(shape, _median(list(self._rates.values()), math.inf))
        usual_card = _median(list(self._cards.values()), math.inf)
        card = np.array([self._cards.get(rank, usual_card) for rank in range(self._world_size)])
        for way, known in self._rates.items():
            rate[way] = known
        for ends, link in self._links.items():
            round_trip = changed.get(ends, {}).get("round_trip_seconds", link.round_trip_seconds)
            for way in (ends, ends[::-1]) if None not in ends else ():
                if not math.isnan(round_trip):
                    latency[way] = round_trip / 2
                if way not in self._rates and way[::-1] in self._rates:
                    rate[way] = self._rates[way[::-1]]
                if "bytes_per_second" in changed.get(ends, {}):
                    rate[way] = changed[ends]["bytes_per_second"]
                    # Because of the slow link, the card may have seemed slower than it is.
                    card[way[0]] = max(card[way[0]], usual_card)
        return Links(latency, rate, card)

    @functools.cached_property
    def _rates(self) -> dict[tuple[int, int], float]:
        """The rates of links, by sender and receiver."""
        found = lone_rates(self._job, self._measured).items()
        return {tuple(map(self._places.get, way)): rate for way, rate in found if {*way} <= {*self._places}}

    @functools.cached_property
    def _cards(self) -> dict[int, float]:
        """The rates of the ranks' cards."""
        found = sending_rates(self._job, self._measured).items()
        return {self._places[sender]: rate for sender, rate in found if sender in self._places}


def _way(change: Change) -> tuple[str, bool]:
    return change.strategy, change.batch_shares is None


def _median(values: Sequence[float], default: float) -> float:
    known = [value for value in values if not math.isnan(value)]
    return float(np.median(known)) if known else default


# Changes that may help, by strategy. Those that change training least come first.


def _of_pipe_sgd(kind: str, is_always: bool, settings: Mapping) -> Iterator[tuple[str, dict]]:
    if kind in OF_LINKS:
        yield from _hiding_more(settings)
        yield from _windows("PipeSGDStrategy", settings)
    else:
        yield from _waiting_less(kind, is_always, {})


def _of_dts(kind: str, is_always: bool, settings: Mapping) -> Iterator[tuple[str, dict]]:
    if kind in OF_LINKS:
        yield from _windows("DTSStrategy", settings)
    else:
        yield from _waiting_less(kind, is_always, {})


def _of_hop(kind: str, is_always: bool, settings: Mapping) -> Iterator[tuple[str, dict]]:
    if kind in OF_LINKS:
        yield "HopStrategy", {"update_order": "parallel"}
        yield from (("PipeSGDStrategy", {"pipeline_width": 2, **each}) for each in ({}, {"codec": "int8"}))
        yield from _windows("HopStrategy", settings)
    else:
        yield from _waiting_less(kind, is_always, settings)


def _hiding_more(settings: Mapping) -> Iterator[tuple[str, dict]]:
    """Settings of Pipe-SGD that hide more communication, or send less."""
    wider = {"pipeline_width": 2} if int(settings.get("pipeline_width", 1)) == 1 else {}
    if wider:
        yield "PipeSGDStrategy", wider
    if codecs.get_for_means(settings.get("codec")) == codecs.Identity():
        for codec in ("truncate16", "int8"):
            yield "PipeSGDStrategy", {"codec": codec}
        if wider:
            yield "PipeSGDStrategy", {**wider, "codec": "int8"}


def _interval(settings: Mapping) -> int:
    """The steps of a window of DTS."""
    return int(settings.get("interval", 4))


def _windows(strategy: str, settings: Mapping) -> Iterator[tuple[str, dict]]:
    """Settings of DTS with longer windows, or longer delays."""
    present = (int(settings.get("delay", 4)), _interval(settings)) if strategy == "DTSStrategy" else (0, 1)
    for delay, interval in ((4, 4), (16, 8)):
        if delay > present[0] and interval >= present[1]:
            yield "DTSStrategy", {"delay": delay, "interval": interval}


def _waiting_less(kind: str, is_always: bool, settings: Mapping) -> Iterator[tuple[str, dict]]:
    """Settings of Hop with which ranks do not wait for a slow one."""
    if kind != "compute":
        return  # Other causes than computing are fixed at their source.
    if not settings.get("num_backup_workers"):
        yield "HopStrategy", {"num_backup_workers": 1}
    if not is_always and not settings.get("max_staleness"):
        yield "HopStrategy", {"num_backup_workers": 1, "max_staleness": 4}
    if settings.get("skip") is None:  # Without skipping, a rank that is slower on average delays all in the long run.
        from hop_tf.strategies.hop.settings import SkipIterations

        yield "HopStrategy", {"num_backup_workers": 1, "skip": SkipIterations()}


_candidates_of = {"PipeSGDStrategy": _of_pipe_sgd, "DTSStrategy": _of_dts, "HopStrategy": _of_hop}

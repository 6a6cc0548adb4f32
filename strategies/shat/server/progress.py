"""`Progress`: the pushes of a training that a server has applied, so that another process can go on in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hop_tf.strategies.shat.server import parameter_server_pb2 as pb


@dataclasses.dataclass
class Participant:
    """The progress of a worker that takes part.

    Attributes:
      process: The name of the worker's process; "" while unknown.
      sequence: The number of the worker's last push that was applied.
      clock: As `sequence`, but a worker that joins late starts as if it had pushed as often as the slowest one.
      num_others: c, the number of others' pushes that were applied since the worker's last answer.
      last_num_others: c of the last answer.
      waits: True if the worker's last push was applied and is not answered.
    """

    process: str = ""
    sequence: int = 0
    clock: int = 0
    num_others: int = 0
    last_num_others: int = 0
    waits: bool = False

    def take_up(self, num_answered: int, clock: int) -> None:
        """Goes on with a worker whose last pushes may be missing from the snapshot of an earlier server process.

        Args:
          num_answered: The number of the worker's pushes of the session that were answered.
          clock: The worker's clock at the last answer.
        """
        if self.sequence > num_answered:
            return  # The push that the worker will repeat is in the snapshot: only its answer was lost.
        if self.sequence < num_answered or self.waits:
            self.num_others, self.waits = 0, False
        if self.sequence < num_answered:
            self.sequence, self.clock = num_answered, clock


@dataclasses.dataclass(frozen=True)
class Progress:
    """The part of a training that was applied.

    Attributes:
      training: The unique name of the training.
      session: The running session.
      num_steps_before: The most steps that one worker had pushed when the session began.
      num_assigned: The number of times that rank 0 has given another model.
      workers: The workers that take part in the session.
    """

    training: str = ""
    session: int = 0
    num_steps_before: int = 0
    num_assigned: int = 0
    workers: Mapping[int, Participant] = dataclasses.field(default_factory=dict)

    @property
    def life(self) -> tuple[str, int, int]:
        """A key of the state. Two states with equal keys differ by pushes only."""
        return self.training, self.session, self.num_assigned

    def to_message(self) -> pb.Progress:
        """Returns the progress as a message for a file."""
        return pb.Progress(
            training=self.training,
            session=self.session,
            num_steps_before=self.num_steps_before,
            num_assigned=self.num_assigned,
            workers=[
                pb.Participant(rank=rank, **dataclasses.asdict(worker)) for rank, worker in sorted(self.workers.items())
            ],
        )

    @classmethod
    def from_message(cls, message: pb.Progress) -> Progress:
        """Returns the progress of a message from `to_message`."""
        names = [field.name for field in dataclasses.fields(Participant)]
        workers = {each.rank: Participant(**{name: getattr(each, name) for name in names}) for each in message.workers}
        return cls(message.training, message.session, message.num_steps_before, message.num_assigned, workers)

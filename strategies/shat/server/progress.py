"""`Progress`: which pushes of a training a server has applied, so that another process can go on in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hop_tf.strategies.shat.server import parameter_server_pb2 as pb


@dataclasses.dataclass
class Participant:
    """What is known of a worker that takes part.

    Attributes:
      process: Names its process; "" while that is unknown.
      sequence: Number of its last push that was applied.
      clock: The same, for a worker that joins late as if it had pushed as often as the slowest one.
      num_others: c.
      last_num_others: c of the last answer.
      waits: Whether its last push was applied and is not answered.
    """

    process: str = ""
    sequence: int = 0
    clock: int = 0
    num_others: int = 0
    last_num_others: int = 0
    waits: bool = False

    def take_up(self, num_answered: int, clock: int) -> None:
        """The worker tells what a former process has answered it, of which a snapshot may lack the last pushes.

        Args:
          num_answered: How many of its pushes of the session were.
          clock: Its clock then.
        """
        if self.sequence > num_answered:
            return  # The push that it is about to repeat is in the snapshot, and its answer was lost.
        if self.sequence < num_answered or self.waits:
            self.num_others, self.waits = 0, False
        if self.sequence < num_answered:
            self.sequence, self.clock = num_answered, clock


@dataclasses.dataclass(frozen=True)
class Progress:
    """What was applied of a training.

    Attributes:
      training: Its name, which no other one has.
      session: The running session.
      num_steps_before: The most that one worker had sent when the session began.
      num_assigned: How often rank 0 has given another model.
      workers: Those that take part in it.
    """

    training: str = ""
    session: int = 0
    num_steps_before: int = 0
    num_assigned: int = 0
    workers: Mapping[int, Participant] = dataclasses.field(default_factory=dict)

    @property
    def life(self) -> tuple[str, int, int]:
        """Two states of one life differ by pushes only."""
        return self.training, self.session, self.num_assigned

    def to_message(self) -> pb.Progress:
        """For a file."""
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
        """What `to_message` has described."""
        names = [field.name for field in dataclasses.fields(Participant)]
        workers = {each.rank: Participant(**{name: getattr(each, name) for name in names}) for each in message.workers}
        return cls(message.training, message.session, message.num_steps_before, message.num_assigned, workers)

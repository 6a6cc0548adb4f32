"""`GroupState`: the model and slots that the servers keep of a group, between steps."""

from __future__ import annotations

import keras

from hop_tf.arguments import identity_of
from hop_tf.errors import HopError
from hop_tf.keras_hook.optimizers import (
    constrain,
    decays,
    finalize,
    num_updates,
    serialized_for_server,
    set_num_updates,
    shift_schedule,
)
from hop_tf.membership.session import Membership
from hop_tf.runtime.group import ExchangeContext
from hop_tf.strategies.shat.server import parameter_server_pb2 as pb
from hop_tf.strategies.shat.server import wire
from hop_tf.strategies.shat.server.server import ASSIGN, BEGIN, PULL, RETIRE
from hop_tf.strategies.shat.server.state import ShardState
from hop_tf.strategies.shat.servers import Answers, Configuration, ServerRequest, Servers
from hop_tf.strategies.shat.settings import ShatSettings
from hop_tf.strategies.shat.shards import ShardView
from hop_tf.strategies.shat.variables import GroupVariables
from hop_tf.tensors import payloads
from hop_tf.transport.base import BULK_LANE


class GroupState:
    """Gives a worker's state to the servers, and the servers' state to the worker.

    Args:
      context: The group, its membership and its variables.
      settings: The settings of the strategy.
      servers: The servers.
    """

    def __init__(self, context: ExchangeContext, settings: ShatSettings, servers: Servers):
        self._context = context
        self._membership = context.membership
        self._settings = settings
        self._servers = servers
        self._variables = GroupVariables(context, servers.shards)
        self._pushes_steps = settings.pushes_steps_of(context.optimizer())
        self._num_pulls = 0
        # The digest of the servers' model, as far as this rank knows.
        self._known_model = 0

    def configure(self, *, joins: bool) -> None:
        """Tells the servers the group that they are to keep, and takes over their state.

        Args:
          joins: True if this process was started again.

        Blocks: until the servers have rank 0's state, or the state of their snapshots.

        Raises:
          MismatchError: If another rank has other settings, variables or another optimizer.
          HopError: If a server cannot keep the group, or some servers have found snapshots and others have not.
        """
        context, optimizer, is_first = self._context, self._context.optimizer(), self._membership.rank == 0
        description = self._describe(has_state=is_first and not joins, joins=joins)
        decay = [False] * len(context.packing.specs)
        if not self._pushes_steps:
            decay[: len(context.trained)] = decays(optimizer, context.trained)
        state = None
        if description.has_state:
            slots = {} if self._pushes_steps else self._variables.slots()
            state = self._variables.model(), slots, num_updates(optimizer)

        def configuration(shard: ShardView) -> Configuration:
            parts = () if state is None else shard.state_of(*state).to_parts()
            return Configuration(shard.describe(description, decay), parts)

        answers = self._servers.configure(configuration, sources=() if joins or is_first else (0,))
        states = self._take_over(answers)
        # If workers push steps, the slots of earlier updates are lost, so only the schedule moves on.
        go_on_after = shift_schedule if self._pushes_steps else set_num_updates
        if joins:
            go_on_after(optimizer, max(state.num_steps for state in states))
        elif any(answer.is_under_way for answer, _ in answers.values()):
            # The count at the start of the session, because this rank is to make all steps of the session.
            go_on_after(optimizer, max(answer.num_steps_before for answer, _ in answers.values()))

    def _describe(self, *, has_state: bool, joins: bool) -> pb.Configure:
        # Plain gradient descent applies a pushed step if it gets the step as the gradient.
        optimizer = keras.optimizers.SGD() if self._pushes_steps else self._context.optimizer()
        return pb.Configure(
            group=self._context.group,
            settings=identity_of(self._settings),
            optimizer=serialized_for_server(optimizer),
            codec=wire.codec_to_json(self._settings.lossiest),
            has_state=has_state,
            joins=joins,
            process=self._membership.transport.incarnation,
        )

    def pull(self, *, after_offers: bool = False, finalizes: bool = False) -> None:
        """Takes over the servers' model and slots, and applies the variables' constraints.

        Args:
          after_offers: True to take the state that the servers have after rank 0's offers of the session.
          finalizes: True to replace weights by their averages, if the optimizer keeps these, as `fit` does at its end.

        Blocks: until the servers have sent their state. With `after_offers` also until rank 0 has called
          `announce_offers`, or the servers know that it will not.

        Raises:
          HopError: If a server was lost.
        """
        self._num_pulls += 1
        number, session = self._num_pulls, self._servers.session if after_offers else 0
        header = pb.Pull(group=self._context.group, number=number, session=session).SerializeToString()
        request = ServerRequest(
            queue=PULL,
            operation="receive state",
            message=lambda shard, is_missing: (header, ()),
            is_answer=lambda answer: answer.number == number,
            shards=self._servers.shards,
        )
        with self._servers.giving_up_alone():
            answers = self._servers.call(request)
        for answer, _ in answers.values():
            if answer.error:
                raise HopError(f"rank {self._membership.rank}: {answer.error}")
        if (optimizer := self._context.optimizer()) is None:
            return  # The optimizer was replaced, for example by a new `compile`.
        states = self._take_over(answers)
        if constrain(optimizer, self._context.trained):
            self.keep_model()
        if finalizes and any(state.iterations for state in states):  # Before the first update there are no averages.
            finalize(optimizer)

    def _take_over(self, answers: Answers) -> list[ShardState]:
        """Assigns the servers' state to the variables."""
        states = [shard.decode_state(answers[shard.server][1]) for shard in self._servers.shards]
        for shard, state in zip(self._servers.shards, states, strict=True):
            shard.num_pushes = state.num_pushes
        self._known_model = self._variables.digest(self._variables.write(states))
        return states

    def offer(self) -> None:
        """Gives the servers rank 0's model, if it differs from the model that they had. Does nothing on other ranks."""
        if self._membership.rank != 0:
            return
        buckets = self._variables.model()
        digest = self._variables.digest(buckets)
        if digest != self._known_model:
            self._known_model = digest
            self._servers.resume()  # A server that was started again does not know the group yet.
            header = pb.Assign(group=self._context.group, session=self._servers.session).SerializeToString()
            for shard in self._servers.shards:
                payload = payloads.join(shard.cut(buckets))
                shard.num_assigned += 1
                self._membership.send(shard.server, ASSIGN, header, payload, lane=BULK_LANE)

    def keep_model(self) -> None:
        """Makes `offer` treat this rank's present model as known to the servers, although they have another one."""
        self._known_model = self._variables.digest(self._variables.model())

    def retire(self) -> None:
        """Tells the servers that this rank no longer needs the group."""
        header = pb.Retire(group=self._context.group).SerializeToString()
        for shard in self._servers.shards:
            self._membership.notify(shard.server, RETIRE, header)


def announce_offers(membership: Membership) -> None:
    """Tells the servers that rank 0 has offered the models of all groups that it has changed before the session."""
    header = pb.Begin(session=membership.session).SerializeToString()
    for server in membership.servers:
        membership.send(server, BEGIN, header, lane=BULK_LANE)  # On this lane it arrives after the assigned models.

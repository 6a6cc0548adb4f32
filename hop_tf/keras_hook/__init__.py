"""The one folder that knows private parts of TensorFlow and Keras: how a training step is seen and changed.

Under an unmodified `fit`, one training step runs through these hooks, in this order:

    Strategy.run(model.train_step)           -> Extended._call_for_each_replica -> TrainingHooks.enter_step
      forward, backward, clipping, decay
      Optimizer._all_reduce_sum_gradients    -> identity: they are exchanged with the update
      ReplicaContext.merge_call(update)      -> TrainingHooks.exchange: the scheme's half of the graph
        optimizer update                     -> TrainingHooks.after_update
                                             -> TrainingHooks.leave_step

Hooks run while the step is traced and emit operations; with `run_eagerly=True` they run in every step.

What private names used here mean is asserted in `tests/keras_hook/private_api_test.py`, which fails where they change;
those that are imported fail at once where they are gone.
"""

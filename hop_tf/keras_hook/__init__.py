"""Observes and changes training steps. The only folder that uses private parts of TensorFlow and Keras.

Under an unmodified `fit`, one training step runs through these hooks, in this order:

    Strategy.run(model.train_step)           -> Extended._call_for_each_replica -> TrainingHooks.enter_step
      forward, backward, clipping, decay
      Optimizer._all_reduce_sum_gradients    -> identity: gradients are exchanged at the update
      ReplicaContext.merge_call(update)      -> TrainingHooks.exchange: the scheme's half of the graph
        optimizer update                     -> TrainingHooks.after_update
                                             -> TrainingHooks.leave_step

Hooks run while the step is traced and emit operations; with `run_eagerly=True` they run in every step.

`tests/keras_hook/private_api_test.py` asserts the meaning of the private names used here, and fails if one changes. If
an imported name is removed, the import fails.
"""

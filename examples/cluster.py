"""Trains the digits on a cluster, whatever has started it: Slurm, Kubernetes, mpirun, torchrun, `hop_tf launch`.

    sbatch examples/slurm/cpu.sbatch examples/cluster.py --backup=backup      # docs/slurm.md
    kubectl apply -f examples/kubernetes/indexed_job.yaml                     # docs/kubernetes.md
    python -m hop_tf launch --num_workers=2 examples/cluster.py               # on one machine

The script shows what a program on a cluster needs besides its model: the addresses of the other processes, the secret
of the job, TLS files, and backups. A job that is started again goes on from its backups. With `--strategy=shat`,
parameter servers run the script, too, or run `python -m hop_tf serve`.
"""

import argparse
import os

import keras
from digits import build_model, load_data

import hop_tf


def make_options(args):
    """The credentials of the ranks' connections. The files are named as in a Secret of Kubernetes."""
    tls = {}
    if args.tls:
        files = {"tls_certificate_chain": "tls.crt", "tls_private_key": "tls.key", "tls_root_certificates": "ca.crt"}
        tls = {name: os.path.join(args.tls, file) for name, file in files.items()}
    return hop_tf.CommunicationOptions(
        timeout_seconds=args.timeout_seconds, cluster_token=os.environ.get("HOP_TF_CLUSTER_TOKEN") or None, **tls
    )


def make_strategy(args):
    """Pipe-SGD, which needs no servers, or SHAT."""
    resolver = hop_tf.cluster_from_environment(num_ps=args.num_ps, timeout_seconds=args.timeout_seconds)
    arguments = {"cluster_resolver": resolver, "communication_options": make_options(args)}
    if args.strategy == "shat":
        snapshots = hop_tf.SnapshotOptions(directory=args.backup) if args.backup else None
        return hop_tf.SHATParameterServerStrategy(snapshots=snapshots, **arguments)
    return hop_tf.PipeSGDStrategy(**arguments)


def main():
    """Trains, and evaluates on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=("pipe_sgd", "shat"), default="pipe_sgd")
    parser.add_argument("--num_ps", type=int, default=0, help="with shat: how many of the processes are servers")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=64, help="global batch, shared among the ranks")
    parser.add_argument("--backup", help="directory that all machines share, for backups, or the servers' snapshots")
    parser.add_argument("--tls", help="directory with this process's tls.crt and tls.key, and with ca.crt")
    parser.add_argument("--timeout_seconds", type=float, default=60.0, help="how long to wait for a silent process")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)  # The same on all ranks, which take disjoint parts of each shuffled batch.
    x_train, x_test, y_train, y_test = load_data()

    strategy = make_strategy(args)  # With SHAT, a server stays in this line, and ends here.
    with strategy.scope():
        model = build_model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss="sparse_categorical_crossentropy",
            metrics=["accuracy"],
        )
    backups = args.backup and args.strategy == "pipe_sgd"
    callbacks = [hop_tf.callbacks.AtomicBackupAndRestore(args.backup)] if backups else []
    model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, callbacks=callbacks, verbose=2)

    strategy.synchronize(model)
    if strategy.is_chief:
        _, accuracy = model.evaluate(x_test, y_test, verbose=0)
        print(f"{strategy.world_size} ranks, accuracy: {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()

"""The environment variables of launchers."""

from absl.testing import absltest, parameterized

from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers import variables
from hop_tf.tools.launchers.environment import find_place

_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "MASTER_ADDR": "node0"}
_PMI = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "node0"}
_PMIX = {"PMIX_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}
_ADDRESSES = {"HOP_TF_ADDRESSES": "train-[0-1].train:7400,other:1", "JOB_COMPLETION_INDEX": "1"}
_SLURM = {"SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


class FindPlaceTest(parameterized.TestCase):
    @parameterized.parameters(
        (_TORCHRUN, "torchrun", 1, 4, ("node0", 29400)),
        ({**_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun", 1, 4, ("node0", 29401)),
        ({**_TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}, "torchrun", 1, 4, ("node0", 29400)),
        ({**_TORCHRUN, "HOP_TF_RENDEZVOUS_PORT": "7"}, "torchrun", 1, 4, ("node0", 7)),
        ({**_TORCHRUN, "MASTER_ADDR": "[::1]"}, "torchrun", 1, 4, ("::1", 29400)),
        (_OPEN_MPI, "mpirun (Open MPI)", 2, 3, ("node0", 29500)),
        ({**_OPEN_MPI, "MASTER_PORT": "5"}, "mpirun (Open MPI)", 2, 3, ("node0", 5)),
        ({**_OPEN_MPI, "PMIX_RANK": "2"}, "mpirun (Open MPI)", 2, 3, ("node0", 29500)),
        (_PMI, "mpirun (PMI)", 0, 2, ("node0", 29500)),
        (_PMIX, "mpirun (PMIx)", 1, 2, ("node0", 29500)),
    )
    def test_finds(self, environ, launcher, number, num_processes, master):
        place = find_place(environ)
        self.assertEqual((place.launcher, place.number, place.num_processes), (launcher, number, num_processes))
        self.assertEqual(place.master, master)
        self.assertIsNone(place.addresses)

    @parameterized.parameters(
        (_ADDRESSES, 1), ({**_ADDRESSES, "HOP_TF_NUMBER": "2"}, 2), ({**_ADDRESSES, "HOP_TF_NUMBER": ""}, 1)
    )
    def test_addresses(self, environ, number):
        place = find_place(environ)
        self.assertEqual((place.number, place.num_processes), (number, 3))
        self.assertEqual(place.addresses, ("train-0.train:7400", "train-1.train:7400", "other:1"))

    def test_addresses_of_ipv6(self):
        place = find_place({"HOP_TF_ADDRESSES": "[fd00::1]:7400,n[1-2]:65535,[fe80::2%eth0]:1", "HOP_TF_NUMBER": "0"})
        self.assertEqual(place.addresses, ("[fd00::1]:7400", "n1:65535", "n2:65535", "[fe80::2%eth0]:1"))

    def test_nothing(self):
        for environ in (
            {},
            {"SLURM_JOB_ID": "4"},
            {"JOB_COMPLETION_INDEX": "1"},
            {"RANK": "", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        ):
            self.assertIsNone(find_place(environ))

    def test_one_process_needs_no_master(self):
        self.assertIsNone(find_place({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).master)

    def test_local_numbers(self):
        for names in (
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **_TORCHRUN},
            {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", **_OPEN_MPI},
            {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", **_PMI},
        ):
            place = find_place(names)
            self.assertEqual((place.local_number, place.num_local), (1, 2))

    @parameterized.parameters(
        ({**_ADDRESSES, **_TORCHRUN, **_OPEN_MPI, **_SLURM}, "a launcher that sets HOP_TF_ADDRESSES"),
        ({**_TORCHRUN, **_OPEN_MPI, **_SLURM}, "torchrun"),
        ({**_OPEN_MPI, **_SLURM}, "mpirun (Open MPI)"),  # Slurm's are those of the daemon that mpirun has started.
        ({**_SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, "srun (Slurm)"),  # srun --mpi=pmi2
        ({**_SLURM, "PMIX_RANK": "1"}, "srun (Slurm)"),  # srun --mpi=pmix
        ({**_SLURM, "PMI_RANK": "5", "PMI_SIZE": "8", "MASTER_ADDR": "n1"}, "mpirun (PMI)"),
        ({**_SLURM, "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}, "srun (Slurm)"),
    )
    def test_one_launcher_within_another(self, environ, launcher):
        self.assertEqual(find_place(environ).launcher, launcher)

    @parameterized.parameters(
        ({**_TORCHRUN, "RANK": "4"}, "RANK must be below WORLD_SIZE. Received: RANK='4', WORLD_SIZE='4'.*unset them"),
        ({**_OPEN_MPI, "OMPI_COMM_WORLD_RANK": "3"}, "OMPI_COMM_WORLD_RANK='3', OMPI_COMM_WORLD_SIZE='3'"),
        ({**_TORCHRUN, "RANK": "-1"}, "RANK must be a number from 0. Received: RANK='-1'"),
        ({**_TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({**_TORCHRUN, "RANK": "²"}, "Received: RANK='²'"),
        ({**_TORCHRUN, "LOCAL_RANK": "x"}, "LOCAL_RANK='x'"),
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set, too.*RANK='0', no WORLD_SIZE"),
        ({**_TORCHRUN, "MASTER_PORT": ""}, "MASTER_PORT must be set, too.*MASTER_PORT=''. Unset all"),
        ({**_TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT must be a number from 0 to 65535"),
        ({**_TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT must give a port from 1"),
        ({**_TORCHRUN, "HOP_TF_RENDEZVOUS_PORT": "x"}, "HOP_TF_RENDEZVOUS_PORT='x'"),
        ({"WORLD_SIZE": "4"}, "RANK must be set, too.*no RANK, WORLD_SIZE='4', no LOCAL_RANK"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_RANK must be set"),
        ({"PMI_SIZE": "4"}, "PMI_RANK must be set"),
        ({"PMI_RANK": "4"}, "PMI_SIZE must be set"),
        ({"PMIX_RANK": "1"}, "WORLD_SIZE must be set, too. Received: PMIX_RANK='1', no WORLD_SIZE"),
        (
            {**_OPEN_MPI, "MASTER_ADDR": " "},
            "MASTER_ADDR must name the host of process 0.*mpirun -x MASTER_ADDR=<host>",
        ),
        ({**_PMI, "MASTER_ADDR": ""}, "-genv MASTER_ADDR <host>"),
        ({"HOP_TF_ADDRESSES": "a:1,b:1"}, "HOP_TF_NUMBER must tell which.*no HOP_TF_NUMBER, no JOB_COMPLETION_INDEX"),
        ({**_ADDRESSES, "HOP_TF_NUMBER": "3"}, "below 3.*HOP_TF_NUMBER='3'"),
        ({**_ADDRESSES, "HOP_TF_NUMBER": "x"}, "HOP_TF_NUMBER='x'"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "a,b:1"}, "must list each host:port once, like.*'a,b:1'"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "a:1,a:1"}, "must list each host:port once"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "a:1,,b:1"}, "no empty part"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "a:0,b:1"}, "ports from 1 to 65535.*'a:0,b:1'"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "a:65536,b:1"}, "ports from 1 to 65535. Received"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "fd00::1:7400,b:1"}, r"or '\[fd00::1\]:7400'"),
        ({**_ADDRESSES, "HOP_TF_ADDRESSES": "n[1-999999999]:1"}, "at most 65536 hosts.*Received: 999999999, by"),
    )
    def test_refuses(self, environ, message):
        with self.assertRaisesRegex(ClusterConfigError, message):
            find_place(environ)

    def test_values_of_others_are_not_told(self):
        with self.assertRaises(ClusterConfigError) as raised:
            variables.read_torchrun({"RANK": "0", "HOP_TF_CLUSTER_TOKEN": "secret"})
        self.assertNotIn("secret", str(raised.exception))


if __name__ == "__main__":
    absltest.main()

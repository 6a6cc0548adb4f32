"""The environment variables of Slurm."""

import itertools
import pathlib

from absl.testing import absltest, parameterized

from hop_tf.errors import ClusterConfigError
from hop_tf.tools.launchers import hosts, slurm

_STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-03],big",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}
# What `srun --distribution=plane=1` sets for the task.
_PLANE = {"SLURM_DISTRIBUTION": "plane", "SLURM_NODEID": "3", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node02"}


class HostsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("node[1]", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,07],other5", ["node01", "node02", "node03", "node07", "other5"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[009-011]", ["node009", "node010", "node011"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a-b[1-2].example.org,c_d", ["a-b1.example.org", "a-b2.example.org", "c_d"]),
        ("[1-2]", ["1", "2"]),
        ("x[1,2,3],y[4],z", ["x1", "x2", "x3", "y4", "z"]),
        (" a,b\n", ["a", "b"]),
    )
    def test_expands(self, text, expected):
        self.assertEqual(hosts.expand_hosts(text), expected)

    @parameterized.parameters("", ",", "a,,b", "a[1-2", "a]", "a[[1]]", "a[1-2],", "[")
    def test_refuses(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "A list of nodes must be like.*Received: "):
            hosts.expand_hosts(text)

    @parameterized.parameters("a[]", "a[x]", "a[3-1]", "a[1-]", "a[-2]", "a[1--2]", "a[1,]", "a[²]", f"a[{'9' * 5000}]")
    def test_refuses_ranges(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "Ranges must be like"):
            hosts.expand_hosts(text)

    @parameterized.parameters("a[1-65537]", "a[0-299]b[0-299]", "a[1-60000],b[1-60000]", f"a[1-{10**17}]")
    def test_refuses_more_than_a_job_has(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "at most 65536 hosts or processes. Received: "):
            hosts.expand_hosts(text)

    @parameterized.parameters(("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("16(x1)", [16]))
    def test_counts(self, text, counts):
        self.assertEqual(slurm.expand_counts(text), counts)

    @parameterized.parameters("", "x", "2(3)", "2(x)", "2,,1", "-1", "2(x3", "1.5")
    def test_refuses_counts(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "must be like '2"):
            slurm.expand_counts(text)

    @parameterized.parameters("1(x999999999)", "999999999", "0(x999999999)")
    def test_refuses_more_tasks_than_a_job_has(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "at most 65536 hosts or processes. Received: 999999999"):
            slurm.expand_counts(text)


class ScriptsTest(absltest.TestCase):
    def test_they_differ_in_options_and_comments_alone(self):
        """Each is to be copied, and Slurm copies it to the node without what lies beside it."""
        folder = pathlib.Path(__file__).parents[3] / "examples" / "slurm"
        cpu, gpu = ((folder / f"{name}.sbatch").read_text().splitlines() for name in ("cpu", "gpu"))
        commands = [[line for line in lines if not line.startswith("#")] for lines in (cpu, gpu)]
        self.assertNotEmpty(commands[0])
        self.assertEqual(*commands)


class LayoutTest(parameterized.TestCase):
    @parameterized.parameters("block", "block:cyclic", "", "block,Pack")
    def test_block(self, distribution):
        self.assertEqual(slurm.lay_out([2, 1], distribution), [(0, 0), (0, 1), (1, 0)])

    @parameterized.parameters("cyclic", "cyclic:block", "cyclic,NoPack")
    def test_cyclic(self, distribution):
        self.assertEqual(slurm.lay_out([3, 1, 2], distribution), [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)])


class ReadTest(parameterized.TestCase):
    def test_reads_a_step(self):
        place = slurm.read_slurm(_STEP)
        self.assertEqual((place.number, place.num_processes, place.local_number, place.num_local), (3, 7, 1, 2))
        hosts = [address.split(":")[0] for address in place.addresses]
        self.assertEqual(hosts, ["node01"] * 2 + ["node02"] * 2 + ["node03"] * 2 + ["big"])
        self.assertLen(set(place.addresses), 7)

    def test_all_tasks_see_the_same_addresses(self):
        places = []
        for number in range(7):
            own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number // 2), "SLURM_LOCALID": str(number % 2)}
            places.append(slurm.read_slurm({**_STEP, **own}))
        self.assertLen({place.addresses for place in places}, 1)
        self.assertEqual([place.number for place in places], list(range(7)))

    def test_cyclic(self):
        place = slurm.read_slurm({**_STEP, "SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
        self.assertStartsWith(place.addresses[3], "big:")
        self.assertStartsWith(place.addresses[4], "node01:")

    def test_ports_of_steps_jobs_and_restarts_differ(self):
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        ports = {
            slurm.read_slurm({**_STEP, **dict(zip(names, map(str, numbers), strict=True))}).addresses[0]
            for numbers in itertools.product(range(1000, 1008), range(3), range(3))
        }
        self.assertLen(ports, 8 * 3 * 3)

    def test_a_plane_of_tasks_meets(self):
        place = slurm.read_slurm({**_STEP, **_PLANE, "HOP_TF_FIRST_PORT": "3000"})
        self.assertEqual((place.addresses, place.master), (None, ("node01", 3000)))
        self.assertEqual((place.number, place.num_processes, place.local_number, place.num_local), (3, 7, 0, 2))

    def test_a_plane_on_one_node_need_not_meet(self):
        variables = {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_LOCALID": "3"}
        place = slurm.read_slurm({**_STEP, **_PLANE, **variables, "SLURM_NODEID": "0"})
        self.assertLen(place.addresses, 7)

    @parameterized.parameters("HET", "PACK")  # As Slurm 22.05 writes it; older ones know the second name only.
    def test_components_meet_where_the_first_one_is(self, name):
        """Variables are those of `srun -w node2 -n2 : -w node1 -n1`, where `cyclic` is what Slurm says of it."""
        environ = {
            "SLURM_STEP_NODELIST": "node[1-2]",
            "SLURM_STEP_TASKS_PER_NODE": "1,2",
            "SLURM_DISTRIBUTION": "cyclic",
            "SLURM_HET_SIZE": "2",
            f"SLURM_JOB_NODELIST_{name}_GROUP_0": "node2",
            f"SLURM_JOB_NODELIST_{name}_GROUP_1": "node1",
            "HOP_TF_FIRST_PORT": "3000",
        }
        for number, own in enumerate((("node2", 0, 2), ("node2", 1, 2), ("node1", 0, 1))):
            variables = {"SLURM_PROCID": str(number), "SLURMD_NODENAME": own[0], "SLURM_LOCALID": str(own[1])}
            place = slurm.read_slurm({**environ, **variables})
            self.assertEqual((place.number, place.num_processes, place.master), (number, 3, ("node2", 3000)))
            self.assertEqual((place.local_number, place.num_local), own[1:])
        alone = {**environ, "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0"}
        self.assertEqual(slurm.read_slurm(alone).master, ("node1", 3000))
        del environ[f"SLURM_JOB_NODELIST_{name}_GROUP_0"], environ[f"SLURM_JOB_NODELIST_{name}_GROUP_1"]
        with self.assertRaisesRegex(ClusterConfigError, "SLURM_JOB_NODELIST_HET_GROUP_0 and so on must name nodes"):
            slurm.read_slurm({**environ, "SLURM_PROCID": "0"})

    def test_refuses_orders_that_do_not_tell_where_task_0_is(self):
        for number in range(7):  # On all tasks, also those that are where they would be in blocks.
            with self.assertRaisesRegex(
                ClusterConfigError, "by block, cyclic or plane.*SLURM_DISTRIBUTION='arbitrary'"
            ):
                slurm.read_slurm({**_STEP, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_PROCID": str(number)})

    @parameterized.parameters(
        ("12000-12003,13000", ("12000", "12001")),
        ("[12007,12000-12003]", ("12007", "12000")),
        ("9,8", ("9", "8")),
    )
    def test_reserved_ports(self, text, ports):
        addresses = slurm.read_slurm({**_STEP, "SLURM_STEP_RESV_PORTS": text}).addresses
        self.assertEqual([address.split(":")[1] for address in addresses], [*ports * 3, ports[0]])

    def test_refuses_reserved_ports(self):
        with self.assertRaisesRegex(ClusterConfigError, "Ranges must be like"):
            slurm.read_slurm({**_STEP, "SLURM_STEP_RESV_PORTS": "12000-"})

    def test_first_port(self):
        addresses = slurm.read_slurm({**_STEP, "HOP_TF_FIRST_PORT": "3000"}).addresses
        self.assertEqual(addresses[:3], ("node01:3000", "node01:3001", "node02:3000"))

    @parameterized.parameters({}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {"SLURM_STEP_NODELIST": "a"})
    def test_not_started_by_srun(self, **environ):
        self.assertIsNone(slurm.read_slurm(environ))

    @parameterized.parameters(
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID and SLURM_STEP_TASKS_PER_NODE contradict.*task 7 of 7 tasks"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS='8', SLURM_STEP_TASKS_PER_NODE='2.x3.,1'. Start"),
        ({"SLURM_STEP_NODELIST": "a,b"}, "2 nodes, but tasks of 4.*SLURM_STEP_NODELIST='a,b'"),
        ({"SLURM_LOCALID": "0"}, "Task 3 should be task 1 of node 1.*SLURM_LOCALID='0'.*srun --distribution=block"),
        ({"SLURM_STEP_RESV_PORTS": "12000"}, "a port for each task of a node, 2.*srun --resv-ports=2"),
        ({"HOP_TF_FIRST_PORT": "65535"}, "2 ports.*HOP_TF_FIRST_PORT='65535'"),
        ({"HOP_TF_FIRST_PORT": "0"}, "HOP_TF_FIRST_PORT='0'"),
        ({"HOP_TF_FIRST_PORT": "x"}, "HOP_TF_FIRST_PORT='x'"),
    )
    def test_refuses(self, changed, message):
        with self.assertRaisesRegex(ClusterConfigError, message):
            slurm.read_slurm({**_STEP, **changed})

    def test_refuses_half_of_the_variables(self):
        environ = {name: value for name, value in _STEP.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
        with self.assertRaisesRegex(ClusterConfigError, "go together.*no SLURM_STEP_TASKS_PER_NODE"):
            slurm.read_slurm(environ)


if __name__ == "__main__":
    absltest.main()

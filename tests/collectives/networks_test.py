"""Routes of networks: pure functions, and Table 2's nine workers."""

import itertools

import tensorflow as tf
from absl.testing import parameterized

from hop_tf.collectives import BCube, Mesh, Tree, get_network

_CUBES = tuple((alpha, beta) for alpha in range(1, 6) for beta in range(1, 5) if alpha**beta <= 27)
_NETWORKS = (
    *((f"bcube:{alpha},{beta}", alpha**beta) for alpha, beta in _CUBES),
    *itertools.product(("mesh", "tree", "tree:1", "tree:3"), (1, 2, 3, 8, 13)),
)


def _holdings(network, world_size):
    """After each step in a BCube: the pieces that each rank has something of, and the ranks that are in it.

    An edge is used in the turn that its level has in the thread.
    """
    routes = network.routes(world_size)
    holds = [{piece: {rank} for piece in range(len(routes))} for rank in range(world_size)]

    def moves(turn):
        for piece, route in enumerate(routes):
            for rank, parent in enumerate(route.parents):
                if parent is not None and (route.levels[rank] - route.thread) % network.beta == turn:
                    yield piece, rank, parent

    yield [dict(each) for each in holds]
    for turn in range(network.beta):
        for piece, rank, parent in moves(turn):
            if piece in holds[rank]:
                holds[parent][piece] = holds[parent][piece] | holds[rank].pop(piece)
        yield [dict(each) for each in holds]
    for turn in reversed(range(network.beta)):
        for piece, rank, parent in moves(turn):
            if piece in holds[parent]:
                holds[rank][piece] = holds[parent][piece]
        yield [dict(each) for each in holds]


class RoutesTest(tf.test.TestCase, parameterized.TestCase):
    @parameterized.parameters(*_NETWORKS)
    def test_routes_are_trees_over_all_ranks(self, name, world_size):
        network = get_network(name)
        network.check_world_size(world_size)
        routes = network.routes(world_size)
        for route in routes:
            self.assertLen(route.parents, world_size)
            for rank in range(world_size):
                self.assertEqual([*[rank], *route.path(rank)][-1], route.root)
                self.assertTrue(all(route.parents[child] == rank for child in route.children[rank]))
        per_root = len(routes) // world_size
        for rank in range(world_size):
            self.assertEqual(sum(route.root == rank for route in routes), per_root)

    @parameterized.parameters(*_CUBES)
    def test_bcube(self, alpha, beta):
        """A rank talks to those that differ in one digit, on that digit's interface; threads use all at once."""
        network = BCube(alpha, beta)
        n = alpha**beta
        for rank in range(n):
            self.assertEqual(network.rank(network.address(rank)), rank)
            for level in range(beta):
                cube = network.cube(rank, level)
                self.assertLen(set(cube), alpha)
                self.assertEqual(cube[network.digit(rank, level)], rank)
        for route in network.routes(n):
            self.assertLessEqual(route.depth, beta)
            for rank, parent in enumerate(route.parents):
                if parent is None:
                    continue
                level = route.levels[rank]
                self.assertIn(parent, network.cube(rank, level))
                # The first step is on the thread's own level, and each further one on the next.
                levels = [route.levels[each] for each in (rank, *route.path(rank))][:-1]
                turns = [(each - route.thread) % beta for each in levels]
                self.assertEqual(turns, sorted(set(turns)))

    @parameterized.parameters(*(cube for cube in _CUBES if cube[0] > 1))
    def test_bcube_loads_all_interfaces_alike(self, alpha, beta):
        network, n = BCube(alpha, beta), alpha**beta
        load = {(rank, level): 0 for rank in range(n) for level in range(beta)}
        for route in network.routes(n):
            for rank, parent in enumerate(route.parents):
                if parent is not None:
                    load[rank, route.levels[rank]] += 1
        self.assertLen(set(load.values()), 1)
        self.assertEqual(load[0, 0] * beta, beta * (n - 1))  # 1 - 1 / n of the vector in all.

    def test_figure_14(self):
        """Mesh: each of three ranks owns a piece, which it gathers and spreads in one step each."""
        for root, route in enumerate(Mesh().routes(3)):
            self.assertEqual(route.parents, tuple(None if rank == root else root for rank in range(3)))

    @parameterized.parameters((1, 8), (2, 3), (3, 2))
    def test_tree(self, num_children, expected_depth):
        routes = Tree(num_children).routes(9)
        self.assertEqual({route.depth for route in routes}, {expected_depth})
        self.assertLessEqual(max(len(c) for route in routes for c in route.children), num_children)

    def test_of_those_that_are_there(self):
        network = BCube(2, 2)
        self.assertEqual(network.routes_among(4), network.routes(4))
        self.assertEqual(network.routes_among(3), Mesh().routes(3))
        self.assertEqual(Tree().routes_among(3), Tree().routes(3))

    def test_cubes(self):
        """Figure 13."""
        self.assertEqual(BCube(3, 2).cubes(0), ((0, 1, 2), (3, 4, 5), (6, 7, 8)))
        self.assertEqual(BCube(3, 2).cubes(1), ((0, 3, 6), (1, 4, 7), (2, 5, 8)))

    @parameterized.parameters("", "ring", "bcube", "bcube:3", "bcube:0,2", "mesh:2", "tree:0", "tree:2,2", 5)
    def test_invalid(self, name):
        with self.assertRaisesRegex(ValueError, "`algorithm` must be 'mesh', .* Received: algorithm="):
            get_network(name)

    @parameterized.parameters("bcube:3,99999999", "bcube:1,17", "bcube:65537,1", "bcube:99999999,16")
    def test_too_large(self, name):
        with self.assertRaisesRegex(ValueError, f"at most 16 levels and 65536 ranks. Received: algorithm='{name}'"):
            get_network(name)

    def test_invalid_world_size(self):
        with self.assertRaisesRegex(ValueError, "`algorithm` must have as many ranks as the cluster.* cluster of 8"):
            BCube(3, 2).check_world_size(8)

    @parameterized.parameters(((0,),), ((0, 3),), ((-1, 0),))
    def test_invalid_address(self, address):
        with self.assertRaisesRegex(ValueError, "`address` must be 2 digits from 0 to 2. Received: address="):
            BCube(3, 2).rank(address)


class Table2Test(tf.test.TestCase):
    """BCube(3, 2): what W(0,0) has after each of the four steps.

    A thread's pieces are <tau[t], (i, j)>, one for each rank: the table's second index is that digit of theirs which
    the step is about.
    """

    def setUp(self):
        super().setUp()
        self._network = BCube(3, 2)
        self._steps = list(_holdings(self._network, 9))

    def _pieces(self, thread, i=None, j=None):
        """Numbers of <tau[thread], (i, j)>; None stands for the asterisk."""
        addresses = itertools.product(range(3) if i is None else (i,), range(3) if j is None else (j,))
        return {thread * 9 + self._network.rank(address) for address in addresses}

    def _workers(self, i=None, j=None):
        addresses = itertools.product(range(3) if i is None else (i,), range(3) if j is None else (j,))
        return {self._network.rank(address) for address in addresses}

    def test_allgather_step_1(self):
        """<tau[0], 0> W(0,*) through cube <0, 0>, and <tau[1], 0> W(*,0) through cube <1, 0>."""
        for piece in self._pieces(0, j=0):
            self.assertEqual(self._steps[1][0][piece], self._workers(i=0))
        for piece in self._pieces(1, i=0):
            self.assertEqual(self._steps[1][0][piece], self._workers(j=0))
        self.assertEqual(set(self._steps[1][0]), self._pieces(0, j=0) | self._pieces(1, i=0))

    def test_allgather_step_2(self):
        """<tau[0], 0> W(*,*) and <tau[1], 0> W(*,*)."""
        everybody = self._workers()
        own = self._pieces(0, 0, 0) | self._pieces(1, 0, 0)
        self.assertEqual(self._steps[2][0], dict.fromkeys(own, everybody))

    def test_allreduce_step_1(self):
        """<tau[0], *> W(*,*) and <tau[1], *> W(*,*): the asterisk is the digit of the level."""
        everybody = self._workers()
        gathered = self._pieces(0, j=0) | self._pieces(1, i=0)
        self.assertEqual(self._steps[3][0], dict.fromkeys(gathered, everybody))

    def test_allreduce_step_2(self):
        """<tau[*], *> W(*,*), on every worker."""
        everything = {piece: self._workers() for piece in range(18)}
        for held in self._steps[4]:
            self.assertEqual(held, everything)
        self.assertLen(self._steps, 5)


if __name__ == "__main__":
    tf.test.main()

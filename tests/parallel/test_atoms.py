"""Which dims are the same: splits, joins and what has to stay whole."""

from lading.ir.sizes import Size
from lading.parallel.atoms import Atoms, divide


def dims(atoms: Atoms, *texts: str) -> list[tuple[int, ...]]:
    return [atoms.new(Size.of(text)) for text in texts]


def sizes(atoms: Atoms, dim: tuple[int, ...]) -> list[str]:
    return [str(atoms.size(leaf)) for leaf in atoms.leaves(dim)]


def test_a_view_splits_what_it_views():
    atoms = Atoms()
    flat, b, s, width, n, d = dims(atoms, "b*s", "b", "s", "n*d", "n", "d")
    atoms.align((*flat, *width), (*b, *s, *n, *d))
    assert sizes(atoms, flat) == ["b", "s"]
    assert atoms.leaves(width) == (*atoms.leaves(n), *atoms.leaves(d))


def test_equal_parts_share_their_atoms():
    atoms = Atoms()
    fused, q, k, n, d = dims(atoms, "3*n*d", "n*d", "n*d", "n", "d")
    atoms.align(q, k)
    atoms.align(fused, (*atoms.new(Size.of(3)), *q))
    atoms.align(q, (*n, *d))
    assert sizes(atoms, fused) == ["3", "n", "d"]
    assert atoms.leaves(k) == atoms.leaves((*n, *d))


def test_unequal_parts_stand_one_after_another():
    atoms = Atoms()
    fused, q, k = dims(atoms, "n*d + k*d", "n*d", "k*d")
    atoms.split_unevenly(fused, (q, k))
    (leaf,) = atoms.leaves(fused)
    assert atoms.parts(leaf) == (q, k)
    again, q2, k2 = dims(atoms, "n*d + k*d", "n*d", "k*d")
    atoms.split_unevenly(again, (q2, k2))
    atoms.align(fused, again)
    assert atoms.leaves(q) == atoms.leaves(q2)
    assert atoms.leaves(k) == atoms.leaves(k2)


def test_dims_that_do_not_fit_stay_whole():
    atoms = Atoms()
    left, right = dims(atoms, "6", "10")
    atoms.align((*left, *right), dims(atoms, "4")[0] + dims(atoms, "15")[0])
    assert all(atoms.is_whole(leaf) for leaf in atoms.leaves((*left, *right)))


def test_what_is_whole_stays_so_after_it_is_found_to_be_another():
    atoms = Atoms()
    left, right = dims(atoms, "d", "d")
    atoms.keep_whole(left)
    atoms.align(left, right)
    assert atoms.is_whole(right[0])


def test_division():
    assert str(divide(Size.of("2*b*s"), Size.of("b"))) == "2*s"
    assert str(divide(Size.of("d"), Size.of(2))) == "d/2"
    assert str(divide(Size.of("n*d + 2*k*d"), Size.of("d"))) == str(Size.of("n + 2*k"))
    assert divide(Size.of("d"), Size.of("n")) is None
    assert divide(Size.of(6), Size.of(4)) is None

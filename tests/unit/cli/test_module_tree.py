"""The tree of modules: what stands together, and what is summed."""

from __future__ import annotations

from whale.cli.module_tree import Module, Piece, module_of


def layer(number: int, stage: int, *, deep: bool = True) -> list[Piece]:
    way = ("blocks", "h", str(number))
    return [Piece((*way, "attention") if deep else way, stage, 10, 1.0), Piece((*way, "mlp"), stage, 20, 2.0)]


def lines(module: Module, depth: int = 0) -> list[str]:
    own = f"{'  ' * depth}{module.name or '-'} {module.stages} {module.num_bytes} {module.seconds:g}"
    return [own, *(line for inside in module.inside for line in lines(inside, depth + 1))]


def test_numbered_modules_that_are_placed_alike_stand_together() -> None:
    pieces = [Piece(("embedding",), 0, 5, 0.5), *layer(0, 0), *layer(1, 0), *layer(2, 1), Piece(("head",), 1, 7, 3.0), Piece((), 1, 0, 1.0)]
    assert lines(module_of("", pieces)) == [
        "- (0, 1) 102 13.5",
        "  embedding (0,) 5 0.5",
        "  blocks.h (0, 1) 90 9",
        "    0 .. 1 (0,) 60 6",
        "      attention (0,) 20 2",
        "      mlp (0,) 40 4",
        "    2 (1,) 30 3",
        "      attention (1,) 10 1",
        "      mlp (1,) 20 2",
        "  head (1,) 7 3",
    ]


def test_modules_that_are_built_otherwise_stay_apart() -> None:
    found = module_of("", [*layer(0, 0), *layer(1, 0, deep=False), *layer(2, 0)])
    assert [each.name for each in found.inside[0].inside] == ["0", "1", "2"]


def test_nothing_is_lost() -> None:
    pieces = [*layer(0, 0), *layer(1, 0), *layer(2, 1, deep=False)]
    found = module_of("", pieces)
    assert (found.num_bytes, found.seconds) == (sum(p.num_bytes for p in pieces), sum(p.seconds for p in pieces))

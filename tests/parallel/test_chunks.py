"""Segments of each pipeline rank."""

import pytest

from lading.catalog.tables import family_table
from lading.errors import ConfigError
from lading.ir.layout import Layout, parse_layout
from lading.parallel.chunks import chunks, split_layers


def gpt(layers: int):
    return family_table("gpt", layers=layers, h=64, n=4, v=100)


def test_the_embedding_is_first_and_the_head_last():
    assert chunks(gpt(8), parse_layout("pp2")) == ((((0, 1), (1, 4)),), (((1, 4), (2, 1)),))
    assert chunks(gpt(8), Layout()) == ((((0, 1), (1, 8), (2, 1)),),)


def test_chunks_of_interleaved_and_of_turning_pipelines():
    loops = chunks(gpt(8), parse_layout("pp2,vpp2"))
    assert loops == ((((0, 1), (1, 2)), ((1, 2),)), (((1, 2),), ((1, 2), (2, 1))))
    turns = chunks(gpt(8), parse_layout("pp2,vpp2,dualpipe-v"))
    assert turns == ((((0, 1), (1, 2)), ((1, 2), (2, 1))), (((1, 2),), ((1, 2),)))


def test_layers_that_do_not_divide():
    assert split_layers(126, parse_layout("pp16")) == (7, *[8] * 14, 7)
    assert split_layers(126, parse_layout("pp16,vpp8")) == (0, *[1] * 126, 0), "embedding and head alone at the ends"
    assert chunks(gpt(6), parse_layout("pp4,vpp2"))[0] == (((0, 1),), ((1, 1),))
    assert split_layers(32, parse_layout("pp3")) == (11, 11, 10)
    assert split_layers(5, parse_layout("pp4")) == (2, 1, 1, 1)
    assert chunks(gpt(5), parse_layout("pp2"), layers=(2, 3))[0] == (((0, 1), (1, 2)),)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"one layer for each of pp 4 x vpp 2 stages, .* got 5 layers; .* is 5, or 7"):
        chunks(gpt(5), parse_layout("pp4,vpp2"))
    with pytest.raises(ConfigError, match=r"2 counts of layers \(pp 2 x vpp 1\) that add up to 6, got 2 .* 7: 3, 4"):
        chunks(gpt(6), parse_layout("pp2"), layers=(3, 4))
    with pytest.raises(ConfigError, match="dualpipe-v has 2 chunks of a rank"):
        chunks(gpt(6), parse_layout("pp2,dualpipe-v"))

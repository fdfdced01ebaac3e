"""The demo's own parts: a split by file, batches that depend on the step alone, a bigram, a causal model."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from lm.data import Bigram, batch, is_validation, read_corpus, validation_batches
from lm.model import Config, Transformer, next_byte_loss, sample
from lm.screen import draw_losses

SMALL = Config(width=32, layers=2, heads=2, hidden=48, length=16)


def library(folder: Path) -> Path:
    """A small library of thirty files, and two that must be left out."""
    for number in range(30):
        (folder / f"module{number}.py").write_text(f"file {number}\n" * 20)
    for left_out in ("test", "site-packages"):
        (folder / left_out).mkdir()
        (folder / left_out / "x.py").write_text("secret")
    return folder


def test_every_file_is_on_one_side_of_the_split(tmp_path: Path) -> None:
    corpus = read_corpus(library(tmp_path))
    train, validation = bytes(corpus.train.tolist()), bytes(corpus.validation.tolist())
    assert corpus.train_files + corpus.validation_files == 30
    assert corpus.validation_files > 0
    for number in range(30):
        text = f"file {number}\n".encode() * 20
        assert (text in validation) == is_validation(f"module{number}.py")
        assert (text in train) != (text in validation)
    assert b"secret" not in train + validation


def test_about_a_tenth_of_the_files_is_for_validation() -> None:
    assert 0.07 < sum(is_validation(f"folder/file{i}.py") for i in range(2000)) / 2000 < 0.13


def test_ranks_share_one_batch_and_labels_follow_ids() -> None:
    text = torch.arange(5000) % 251
    whole = batch(text, step=7, rank=0, world=1, size=4, length=16)
    parts = [batch(text, step=7, rank=rank, world=2, size=2, length=16) for rank in range(2)]
    for i in range(2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), whole[i], rtol=0, atol=0)
    ids, labels = whole
    assert ids.shape == labels.shape == (4, 16)
    torch.testing.assert_close((ids + 1) % 251, labels, rtol=0, atol=0)
    assert not torch.equal(ids, batch(text, step=8, rank=0, world=1, size=4, length=16)[0])


def test_validation_covers_the_same_places_on_any_number_of_ranks() -> None:
    text = torch.arange(5000)
    one = validation_batches(text, count=3, rank=0, world=1, size=4, length=16)
    two = [validation_batches(text, count=3, rank=rank, world=2, size=2, length=16) for rank in range(2)]
    for i in range(3):
        assert torch.equal(one[i][0], torch.cat([two[0][i][0], two[1][i][0]]))


def test_the_bigram_s_loss_is_that_of_its_counts() -> None:
    bigram = Bigram(torch.tensor(list(b"abababac"), dtype=torch.uint8))
    a, b = ord("a"), ord("b")
    # After `a` the text has `b` three times and `c` once; one is added to each of 256.
    expected = -(math.log(4 / 260) + math.log(4 / 259)) / 2
    assert math.isclose(bigram.loss(torch.tensor([[a, b]]), torch.tensor([[b, a]])), expected, rel_tol=1e-6)


def test_the_model_does_not_see_the_future() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_positions_matter_only_by_their_distance() -> None:
    rotary = Transformer(SMALL).blocks[0].attention.rotary
    q, k = torch.randn(2, 1, 1, 1, 16)
    scores = rotary(q.expand(1, 1, 16, 16)) @ rotary(k.expand(1, 1, 16, 16)).transpose(-1, -2)
    for distance in range(-3, 4):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_resetting_from_meta_equals_building_with_the_same_seed() -> None:
    torch.manual_seed(3)
    built = Transformer(SMALL)
    with torch.device("meta"):
        reset = Transformer(SMALL)
    reset.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in reset.modules():
        if callable(again := getattr(module, "reset_parameters", None)):
            again()
    for (name, a), (_, b) in zip(built.named_parameters(), reset.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(built.named_buffers(), reset.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def test_it_learns_a_text_by_heart_and_says_it() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL)
    text = torch.tensor(list(b"weft and warp. " * 4))
    ids, labels = text[:16][None], text[1:17][None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = next_byte_loss(model, ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1
    assert sample(model, b"weft", 10, temperature=0.1) == b"weft and warp."


def test_a_run_without_matplotlib_ends_without_a_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert draw_losses([], 2.4, tmp_path / "loss.png") == "no curve: pip install matplotlib draws one"
    assert not list(tmp_path.iterdir())

import pytest
import torch

from safe_trainer.recipes.text import ALPHABET, Windows, decode, encode, python_docs


def test_characters_and_numbers():
    text = "if x:\n    y = 'z'"
    assert decode(encode(text)) == text
    assert decode(encode("\u00e9\t")) == "??"
    assert len(ALPHABET) == len(set(ALPHABET)) == 96


def test_windows_are_cut_with_a_stride():
    windows = Windows(torch.arange(10), length=4, stride=3)
    assert [windows[i][0].tolist() for i in range(len(windows))] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_the_reference_is_split_without_a_common_paragraph():
    data = python_docs(block_size=32, stride=32)
    assert data["train"][0][0].shape == (33,)
    assert data["train"][0][0].dtype == torch.int64
    texts = {part: decode(torch.cat([piece[:-1] for piece in data[part].pieces])) for part in data}
    assert len(texts["train"]) > 250_000
    assert len(texts["val"]) == pytest.approx(len(texts["train"]) / 18, rel=0.02)
    for part in ("val", "test"):
        paragraphs = [text for text in texts[part].split("\n\n") if len(text) > 60]
        assert len(paragraphs) > 20
        assert not any(text in texts["train"] for text in paragraphs)


@pytest.mark.parametrize("options", [{"block_size": 0}, {"stride": 0}, {"val_share": 0.6, "test_share": 0.5}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="data"):
        python_docs(**options)

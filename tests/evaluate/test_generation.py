"""Text written by a model: greedy, drawn, seeded, and never unknown."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

import bayesrnn as br
from bayesrnn.errors import Invalid
from bayesrnn.evaluate import generation

VOCABULARY = 6


def language_model() -> br.Bayesian:
    torch.manual_seed(5)
    return br.bayesianize(
        br.LanguageModel(VOCABULARY, 4, 5, layers=1, init=1.5), br.Gaussian(0.4), br.Normal()
    )


def fixed_logits(logits: list[float]) -> br.Bayesian:
    """A model that says the same at every place, whatever came before."""
    network = br.LanguageModel(len(logits), 2, 2, layers=1)
    with torch.no_grad():
        network.decoder.weight.zero_()
        network.decoder.bias.copy_(torch.tensor(logits))
    return br.bayesianize(network)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_temperature_0_takes_the_likeliest_token_each_time() -> None:
    model = language_model().eval()
    text = [1, 4, 2]
    for _ in range(12):
        with torch.no_grad():
            logits, _ = model(torch.tensor(text)[:, None])  # the whole text anew, no state
        text.append(int(logits[-1, 0].argmax()))
    assert br.generate(model, [1, 4, 2], 12, temperature=0) == text[3:]
    assert len(set(text[3:])) > 1


def test_temperature_0_leaves_out_what_is_forbidden() -> None:
    model = fixed_logits([0.0, 3.0, 2.0, 1.0])
    assert br.generate(model, [0], 3, temperature=0) == [1, 1, 1]
    assert br.generate(model, [0], 3, temperature=0, forbidden=(1,)) == [2, 2, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_knows_no_word_says_so(temperature: float) -> None:
    with pytest.raises(br.UserError, match="no token that may be chosen"):
        br.generate(fixed_logits([1.0]), [0], 3, temperature, forbidden=(0,))


@pytest.mark.parametrize("weights", ["mean", "sample"])
def test_the_same_seed_gives_the_same_text(weights: str) -> None:
    model = language_model().train()
    texts = [br.generate(model, [0], 40, 1.0, weights, seeded(s)) for s in (1, 1, 2)]  # type: ignore[arg-type]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert model.training


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature: float) -> None:
    logits = [0.0, 1.0, -1.0, 0.5]
    text = br.generate(fixed_logits(logits), [0], 3000, temperature, generator=seeded(1))
    counts = np.bincount(text, minlength=4)
    powers = np.exp(np.array(logits) / temperature)
    assert chisquare(counts, 3000 * powers / powers.sum()).pvalue > 1e-3
    other = np.exp(np.array(logits) / (1.5 * temperature))  # the test can tell
    assert chisquare(counts, 3000 * other / other.sum()).pvalue < 1e-3


def test_forbidden_tokens_leave_the_others_in_proportion() -> None:
    logits = [0.0, 4.0, 1.0, 0.5]
    text = br.generate(fixed_logits(logits), [0], 2000, generator=seeded(1), forbidden=(1,))
    counts = np.bincount(text, minlength=4)
    assert counts[1] == 0
    powers = np.exp(np.array([0.0, 1.0, 0.5]))
    assert chisquare(counts[[0, 2, 3]], 2000 * powers / powers.sum()).pvalue > 1e-3


def test_one_draw_of_the_weights_is_kept_for_the_whole_text() -> None:
    model = language_model()
    generator = seeded(9)
    found = br.generate(model, [3], 15, 0.0, "sample", generator)
    with model.eval().weights("sample"), torch.no_grad():
        model.resample(generator=seeded(9))
        text = [3]
        for _ in range(15):
            logits, _ = model(torch.tensor(text)[:, None])
            text.append(int(logits[-1, 0].argmax()))
    assert found == text[1:]
    others = [br.generate(model, [3], 15, 0.0, "sample", seeded(s)) for s in range(10)]
    assert len({tuple(text) for text in others}) > 1


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (([], 3), "prompt"),
        (([0], -1), "length"),
        (([0], 3, -1.0), "temperature"),
        (([0], 3, float("nan")), "temperature"),
        (([0], 3, float("inf")), "temperature"),
    ],
)
def test_impossible_wishes_are_refused_by_name(arguments: tuple[object, ...], key: str) -> None:
    with pytest.raises(Invalid) as caught:
        br.generate(language_model(), *arguments)  # type: ignore[arg-type]
    assert [problem[0] for problem in caught.value.problems] == [key]


WORDS = br.Vocabulary(("<unk>", "yes", "no", "<eos>", ",", "!"))


def test_written_text_is_readable_and_never_unknown() -> None:
    settings = br.TextData("x", tokens="words")
    loud = fixed_logits([9.0, 1.0, 1.0, 0.5, 0.5, 0.5])  # all for the unknown word
    text = br.generate_text(loud, "well", settings, WORDS, 300, generator=seeded(1))
    assert "<unk>" not in text
    assert "<eos>" not in text
    assert all(token in text for token in ("yes", "no", "\n", ",", "!"))
    assert " ," not in text


def test_a_prompts_line_goes_on_and_no_prompt_begins_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts: list[list[int]] = []

    def watched(model: object, prompt: list[int], *_: object) -> list[int]:
        starts.append(prompt)
        return [1]

    monkeypatch.setattr(generation, "generate", watched)
    settings = br.TextData("x")
    for prompt in ("yes no", "yes no\n", "", "maybe"):
        br.generate_text(fixed_logits([0.0] * 6), prompt, settings, WORDS, 1)
    assert starts == [[1, 2], [1, 2, 3], [3], [0]]
    letters = br.Vocabulary(("a", "\n", "<unk>"))
    for prompt in ("aa", ""):
        characters = br.TextData("x", tokens="characters")
        br.generate_text(fixed_logits([0.0] * 3), prompt, characters, letters, 1)
    assert starts[4:] == [[0, 0], [1]]

"""`kvwarehouse size` from the command line: figures that are published, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvwarehouse.cli import main
from kvwarehouse.cli.exit_codes import Exit

SHAPE_70B = ("--layers", "80", "--kv-heads", "8", "--head-dim", "128")


@pytest.fixture
def size(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> Any:
        assert main(["size", *arguments, "--json"]) == Exit.OK
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs what must be refused as a usage error; returns the message."""

    def run(*arguments: str) -> str:
        assert main(["size", *arguments]) == Exit.USAGE
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err

    return run


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("qwen2.5-1.5b", 28_672),
        ("llama-3.3-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("llama-4-maverick", 196_608),
        ("deepseek-v3", 70_272),
    ],
)
def test_published_models_have_their_figures_at_every_context(
    size: Any, model: str, bytes_per_token: int
) -> None:
    found = size("--model", model, "--dtype", "fp16")
    assert found["bytes_per_token"] == bytes_per_token
    contexts = {each["tokens"]: each["bytes"] for each in found["contexts"]}
    assert contexts == {tokens: tokens * bytes_per_token for tokens in (10**3, 10**4, 10**5, 10**6)}


def test_deepseek_shows_the_published_uncompressed_figure_beside_what_is_stored(size: Any) -> None:
    found = size("--model", "deepseek-v3")
    assert found["uncompressed_bytes_per_token"] == 1_748_992
    assert found["bytes_per_token"] == 70_272
    assert size("--model", "llama-3.3-70b")["uncompressed_bytes_per_token"] is None


def test_chunked_layers_hold_their_chunk_beyond_it(size: Any) -> None:
    found = size("--model", "llama-4-maverick", "--context", "1000000", "--context", "8000")
    short, long = found["contexts"]
    assert short["held_bytes"] == short["bytes"] == 8_000 * 196_608
    assert long["held_bytes"] == 4_096 * (12 * 1_000_000 + 36 * 8_192)


def test_gpu_fit_shows_tokens_users_and_the_arithmetic(size: Any) -> None:
    fit = size(*SHAPE_70B, "--gpu-memory", "320GB", "--weights", "140GB", "--users", "50")["fit"]
    assert (fit["tokens"], fit["tokens_per_user"]) == (549_316, 10_986)
    assert fit["held_tokens_per_user"] == 10_986
    assert fit["arithmetic"][1] == "180,000,000,000 B / 327,680 B per token = 549,316 tokens"


def test_gpu_fit_counts_what_tensor_parallel_ranks_repeat(size: Any) -> None:
    memory = ("--gpu-memory", "320GB", "--weights", "140GB")
    once = size("--model", "deepseek-v3", *memory)["fit"]["tokens"]
    assert size("--model", "deepseek-v3", *memory, "--tp", "8")["fit"]["tokens"] == once // 8


def test_windowed_model_fits_longer_contexts_than_its_full_figure_says(size: Any) -> None:
    fit = size("--model", "gemma-3-27b", "--gpu-memory", "80GB", "--weights", "54GB")["fit"]
    assert fit["held_tokens_per_user"] > 4 * fit["tokens_per_user"]


@pytest.mark.parametrize(
    ("users", "tokens", "ends"), [(500, 1_554, ": 1,554 tokens each"), (700, 0, "do not fit")]
)
def test_states_are_counted_in_what_fits(size: Any, users: int, tokens: int, ends: str) -> None:
    # The text had the tokens beside no states alone, five times too many.
    memory = ("--gpu-memory", "80GB", "--weights", "16.2GB", "--users", str(users))
    fit = size("--model", "nemotron-h-8b", *memory)["fit"]
    assert fit["held_tokens_per_user"] == tokens
    assert "102,137,856 B of states" in fit["arithmetic"][-1]
    assert fit["arithmetic"][-1].endswith(ends)


def test_tiers_keep_kv_for_capacity_over_the_rate_of_new_tokens(size: Any) -> None:
    load = ("--prompts-per-s", "0.5", "--prompt-tokens", "4000", "--reuse", "0.75")
    (nvme,) = size(*SHAPE_70B, "--nvme", "15TB", *load)["tiers"]
    written_per_s = 0.5 * 1000 * 327_680
    assert nvme["write_bytes_per_s"] == pytest.approx(written_per_s)
    assert nvme["days"] == pytest.approx(15e12 / written_per_s / 86_400)
    assert nvme["drive_writes_per_day"] == pytest.approx(1 / nvme["days"])


def test_config_file_and_its_folder_are_the_same_model(size: Any, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "hidden_size": 8192,
            }
        )
    )
    for place in (path, tmp_path):
        assert size("--config", str(place))["bytes_per_token"] == 327_680


def test_html_page_is_self_contained_and_escapes_names(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
    config.write_text(json.dumps({**shape, "_name_or_path": "<script>alert(1)</script>"}))
    page = tmp_path / "size.html"
    assert main(["size", "--config", str(config), "--html", str(page)]) == Exit.OK
    text = page.read_text()
    assert "<svg" in text
    assert "<script" not in text
    assert not re.search(r"""(src|href|url)\s*[=(]""", text), "it would fetch something"


def test_table_says_bytes_with_separators(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--model", "llama-3.3-70b"]) == Exit.OK
    assert "327,680" in capsys.readouterr().out


def test_list_names_every_model_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "--list", "--json"]) == Exit.OK
    listed = json.loads(capsys.readouterr().out)["models"]
    by_name = {each["model"]: each for each in listed}
    assert by_name["llama-3.3-70b"].items() >= {"layers": 80, "params": 70.6e9}.items()
    gemma = by_name["gemma-4-31b"]
    assert gemma["kinds"] == {"window": 50, "full": 10}
    assert gemma["heads"] == [{"kv_heads": 16, "dim": 256}, {"kv_heads": 4, "dim": 512}]
    assert gemma["fp16_bytes_per_token"] > gemma["fp16_growing_bytes_per_token"]
    assert by_name["kimi-k3"]["params"] is None, "what was not found is not made up"
    assert main(["size", "--list"]) == Exit.OK
    shown = capsys.readouterr().out
    assert "50 window, 10 full" in shown
    assert "unknown" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "llama-3.3-71b"), "llama-3.3-70b"),
        (("--model", "no-such-thing"), "--config"),
        ((), "no model given"),
        (("--model", "gpt-2", "--layers", "3"), "--model and --layers given"),
        (("--layers", "3"), "--kv-heads"),
        (("--layers", "0", "--kv-heads", "8", "--head-dim", "128"), "0 layers"),
        (("--layers", "1000000000", "--kv-heads", "8", "--head-dim", "128"), "1000000000 layers"),
        (("--layers", "2", "--kv-heads", "-8", "--head-dim", "128"), "-8"),
        (("--model", "gpt-2", "--dtype", "fp12"), "fp12"),
        (("--model", "llama-3.3-70b", "--tp", "3"), "TP 3"),
        (("--model", "llama-3.3-70b", "--tp", "0"), "TP 0"),
        (("--model", "llama-3.3-70b", "--pp", "81"), "PP 81"),
        (("--model", "gpt-2", "--context", "0"), "--context 0"),
        (("--model", "gpt-2", "--page-tokens", "-1"), "--page-tokens -1"),
        (("--model", "gpt-2", "--gpu-memory", "80GB"), "belong together"),
        (("--model", "gpt-2", "--gpu-memory", "80GB", "--weights", "90GB"), "leave nothing"),
        (("--model", "gpt-2", "--gpu-memory", "80G", "--weights", "1GB"), "--gpu-memory '80G'"),
        (("--model", "gpt-2", "--nvme", "1TB"), "--prompts-per-s"),
        (
            ("--model", "gpt-2", "--nvme", "1TB", "--prompts-per-s", "nan", "--prompt-tokens", "1"),
            "nan prompts",
        ),
        (("--model", "gpt-2", "--html", "/nowhere/at/all.html"), "/nowhere/at/all.html"),
        (("--config", "/nowhere/config.json"), "cannot be read"),
    ],
)
def test_size_refuses_and_names_the_value(
    refused: Any, arguments: tuple[str, ...], said: str
) -> None:
    assert said in refused(*arguments)

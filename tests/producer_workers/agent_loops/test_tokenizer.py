from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from transformers import AutoTokenizer

from producer_workers.agent_loops.tokenizer import load_tokenizer
from tests.pipeline.site import ROOT

PROGRAM = """
import sys
from producer_workers.build import make_producer, make_worker
from producer_workers.agent_loops.tokenizer import encode_chat, load_tokenizer
encode_chat(load_tokenizer(sys.argv[1]), [{"role": "user", "content": "2 + 2"}])
sys.exit("torch" in sys.modules)
"""


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_general_tokenizer_is_read_without_torch(folder: Path) -> None:
    """A producer and a worker begin seconds earlier."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("model", ["", "llama", "qwen3", "qwen3_moe", "qwen2"])
@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_the_tokenizer_is_the_one_of_the_library(folder: Path, name: str, model: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | {"tokenizer_class": name}))
    if model:
        (folder / "config.json").write_bytes(orjson.dumps({"model_type": model}))
    found: Any = load_tokenizer(str(folder))
    wanted = AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(wanted)
    assert repr(found) == repr(wanted)
    assert found.chat_template == wanted.chat_template

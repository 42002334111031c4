"""Hub names as users write them, and the GGUF file of a repository that each selects."""

from __future__ import annotations

import pytest

from quire.engine.checkpoint.hub_names import HubName, parse_hub_name
from quire.engine.common.errors import ModelError
from quire.engine.gguf.file_selection import file_tag, group_models_by_tag, select_files

NAMES = {
    "owner/name": HubName("owner/name"),
    "owner/name-GGUF:Q4_K_M": HubName("owner/name-GGUF", "Q4_K_M"),
    "owner/name-GGUF:UD-Q4_K_XL": HubName("owner/name-GGUF", "UD-Q4_K_XL"),
    "owner/name/some/file-Q8_0.gguf": HubName("owner/name", file="some/file-Q8_0.gguf"),
    "hf.co/owner/name": HubName("owner/name"),
    "hf.co/owner/name:q8_0": HubName("owner/name", "q8_0"),
    "huggingface.co/owner/name/": HubName("owner/name"),
    "hf://owner/name": HubName("owner/name"),
    "https://huggingface.co/owner/name": HubName("owner/name"),
    "https://huggingface.co/owner/name:Q8_0": HubName("owner/name", "Q8_0"),
    "https://huggingface.co/owner/name/tree/v1.0": HubName("owner/name", revision="v1.0"),
    "https://hf.co/owner/name/resolve/main/a%20b.gguf?download=true": HubName("owner/name", None, "a b.gguf", "main"),
    "https://huggingface.co/owner/name/blob/main/Q8_0/x.gguf": HubName("owner/name", None, "Q8_0/x.gguf", "main"),
    "http://mirror.test/hub/owner/name:Q8_0": HubName("owner/name", "Q8_0"),
}


@pytest.mark.parametrize("name", NAMES)
def test_hub_name_parses_repository_tag_file_and_revision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.test/hub/")
    assert parse_hub_name(name) == NAMES[name]


@pytest.mark.parametrize(
    "name", ["name", "/owner/name", "./owner/name", "~/name", "owner//name", "a/b/c", "a/b:", "a/b:c/d", "é/b", ""]
)
def test_path_is_not_parsed_as_hub_name(name: str) -> None:
    assert parse_hub_name(name) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("https://huggingface.co/datasets/owner/name", "datasets"),
        ("https://huggingface.co/owner", "not the address of a model"),
        ("https://example.com/owner/name", "not an address on the hub"),
        ("https://huggingface.co/owner/name/blob/main/model.safetensors", "owner/name names the whole model"),
        ("owner/name/x.gguf:Q8_0", "both a file and a tag"),
    ],
)
def test_hub_url_that_names_no_model_is_rejected(name: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        parse_hub_name(name)


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("Q8_0/Model-Q8_0-00001-of-00002.gguf", "Q8_0"),
        ("model.IQ4_XS.gguf", "IQ4_XS"),
        ("m-iq2_xxs.gguf", "IQ2_XXS"),
        ("m-TQ1_0.gguf", "TQ1_0"),
        ("m-UD-IQ1_S-00001-of-00003.gguf", "UD-IQ1_S"),
        ("m-NVFP4.gguf", "NVFP4"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Qwen3-4B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("gemma-3-4b-it-BF16.gguf", "BF16"),
        ("model.gguf", "model"),
    ],
)
def test_gguf_file_tag_is_parsed_from_file_name(file: str, tag: str) -> None:
    assert file_tag(file) == tag


FILES = ["m-Q8_0.gguf", "m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", "m-IQ2_M.gguf"]
FILES += ["mmproj-F16.gguf", "README.md", "m-Q6_K-00002-of-00002.gguf", "m-UD-Q5_K_XL.gguf"]


def test_gguf_tag_selects_all_parts_of_one_model() -> None:
    models = group_models_by_tag(FILES)
    assert set(models) == {"Q8_0", "Q4_K_M", "IQ2_M", "UD-Q5_K_XL"}, "no image encoder, nothing that lacks a part"
    assert select_files(models, None, "o/m") == FILES[1:3]
    assert select_files(models, "q8_0", "o/m") == ["m-Q8_0.gguf"]
    assert select_files(models, "Q5_K_XL", "o/m") == ["m-UD-Q5_K_XL.gguf"]


@pytest.mark.parametrize(
    ("there", "nearest"),
    [
        (["Q8_0", "Q5_K_M", "Q3_K_M"], "Q5_K_M"),
        (["F16", "Q8_0"], "Q8_0"),
        (["IQ2_M", "Q2_K"], "Q2_K"),
        (["UD-Q4_K_XL", "Q8_0"], "UD-Q4_K_XL"),
        (["IQ1_S", "IQ2_XXS", "IQ3_M"], "IQ3_M"),
        (["IQ1_S"], "IQ1_S"),
    ],
)
def test_gguf_selection_without_tag_takes_nearest_to_four_bits(there: list[str], nearest: str) -> None:
    assert select_files(group_models_by_tag(f"m-{tag}.gguf" for tag in there), None, "o/m") == [f"m-{nearest}.gguf"]


def test_missing_or_ambiguous_gguf_tag_error_lists_choices() -> None:
    with pytest.raises(ModelError, match=r"o/m has no GGUF file Q9; it has IQ2_M, Q4_K_M, Q8_0, UD-Q5_K_XL"):
        select_files(group_models_by_tag(sorted(FILES)), "Q9", "o/m")
    with pytest.raises(ModelError, match="o/m has no GGUF files"):
        select_files(group_models_by_tag(["model.safetensors"]), None, "o/m")
    with pytest.raises(ModelError, match=r"several GGUF files Q8_0, give one of them: o/m/a-Q8_0\.gguf, o/m/b-Q8_0"):
        select_files(group_models_by_tag(["a-Q8_0.gguf", "b-Q8_0.gguf"]), "Q8_0", "o/m")

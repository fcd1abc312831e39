"""`attn_implementation="flash_jvp"` beside "eager" in tiny random models: values and derivatives in float64."""

import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

import transformers  # noqa: E402
from torch.func import functional_call, grad, jvp, vmap  # noqa: E402
from transformers import masking_utils  # noqa: E402

from torch_bridge import transformers as named  # noqa: E402
from torch_oracle import launched, normal  # noqa: E402

L = 11
DECODER = dict(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, pad_token_id=0,
)  # fmt: skip
ENCODER = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
T5 = dict(
    vocab_size=64, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
)
WHISPER = dict(
    vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8, max_source_positions=7, max_target_positions=16,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
)  # fmt: skip
MODELS = {  # class, configuration, layers of attention
    "bert": ("BertModel", dict(ENCODER, vocab_size=64, max_position_embeddings=16), 2),
    "vit": ("ViTModel", dict(ENCODER, image_size=12, patch_size=4), 2),
    "llama": ("LlamaForCausalLM", DECODER, 2),
    "qwen3": ("Qwen3ForCausalLM", dict(DECODER, use_sliding_window=True, sliding_window=4, max_window_layers=1), 2),
    "gemma2": ("Gemma2ForCausalLM", dict(DECODER, sliding_window=4, query_pre_attn_scalar=4), 2),
    "gpt-oss": (
        "GptOssForCausalLM",
        dict(
            DECODER, sliding_window=4, num_local_experts=2, num_experts_per_tok=2, experts_implementation="eager",
            rope_parameters=dict(rope_type="default", rope_theta=1e4),
        ),
        2,
    ),
    "t5": ("T5ForConditionalGeneration", T5, 6),
    "whisper": ("WhisperForConditionalGeneration", WHISPER, 3),
}  # fmt: skip
DECODERS = ("llama", "qwen3", "gemma2", "gpt-oss")


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    """transformers casts to float32 by this name, in norms and in eager's softmax."""
    monkeypatch.setattr(torch, "float32", torch.float64)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model_of(name, implementation="flash_jvp", **changes):
    cls, config, _ = MODELS[name]
    cls = getattr(transformers, cls)
    config = cls.config_class(**config | changes)
    config._attn_implementation = implementation
    model = cls(config).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    assert model.config._attn_implementation == implementation
    return model


def tokens(*shape):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(1))


def inputs_of(name, padded=True):
    """Arguments of a model, and a mask of what in its results counts."""
    ids, padding = tokens(2, L), torch.ones(2, L, dtype=torch.long)
    if padded:
        padding[1, :4] = 0  # on the left, where queries see no key
    if name == "vit":
        return dict(pixel_values=normal(2, 3, 12, 12)), torch.ones(2, 10, dtype=torch.bool)
    if name == "whisper":
        return dict(input_features=normal(2, 8, 14), decoder_input_ids=ids), torch.ones(2, L, dtype=torch.bool)
    if name == "t5":
        given = dict(input_ids=ids, attention_mask=padding, decoder_input_ids=tokens(2, 7))
        return given, torch.ones(2, 7, dtype=torch.bool)
    return dict(input_ids=ids, attention_mask=padding), padding.bool()


def results(model, given, counts=slice(None), parameters=None):
    parameters = dict(model.named_parameters()) if parameters is None else parameters
    out = functional_call(model, parameters, (), given if "pixel_values" in given else dict(use_cache=False) | given)
    return (out.logits if hasattr(out, "logits") else out.last_hidden_state)[counts]


def loss_of(model, given, counts):
    return lambda parameters: results(model, given, counts, parameters).sin().sum()


def everything(model, given, counts):
    """Value, tangent, gradient and Hessian-vector product with respect to the parameters."""
    at = {n: p.detach() for n, p in model.named_parameters()}
    along = {n: normal(*p.shape, seed=5) for n, p in at.items()}
    value, tangent = jvp(lambda p: results(model, given, counts, p), (at,), (along,))
    gradient, product = jvp(grad(loss_of(model, given, counts)), (at,), (along,))
    return dict(value=value, tangent=tangent, gradient=gradient, product=product)


def flat(tree):
    return {f"{n}.{m}": b for n, a in tree.items() for m, b in (a.items() if isinstance(a, dict) else {"": a}.items())}


def assert_same(got, expected, tolerance=1e-9):
    got, expected = flat(got), flat(expected)
    assert got.keys() == expected.keys()
    for name, b in expected.items():
        scale = max(b.abs().max().item(), 1e-3)
        torch.testing.assert_close(got[name], b, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_values_and_derivatives(name):
    given, counts = inputs_of(name)
    layers = MODELS[name][2]
    launched()
    got = everything(model_of(name), given, counts)
    assert launched() == "D" * 2 * layers + "S" * layers
    assert_same(got, everything(model_of(name, "eager"), given, counts))
    assert launched() == ""


# ------------------------------------------------------------------------------------------------ what queries see


def asked(function, L=9, S=9, first=0, padding=None, **options):
    return dict(
        batch_size=2, q_length=L, kv_length=S, q_offset=first, kv_offset=first + L - S, mask_function=function,
        attention_mask=padding, **dict(allow_is_causal_skip=True) | options,
    )  # fmt: skip


def seen(told, L, S, causal):
    """[B, 1, L, S] of what `mask` gives."""
    i, j = torch.arange(L)[:, None] + S - L, torch.arange(S)
    if told is None:
        return (j <= i if causal and L > 1 else torch.ones(L, S, dtype=torch.bool)).expand(2, 1, L, S)
    if isinstance(told, torch.Tensor):
        return told.expand(2, 1, L, S)
    result = (j <= i).expand(2, 1, L, S)
    result = result if told.left is None else result & (j >= i - told.left)
    result = result if told.keys is None else result & told.keys[:, None, None]
    if told.documents is not None:
        result = result & (told.documents[:, None, :, None] == told.documents[:, None, None])
    return result


PADDING = torch.ones(2, 20, dtype=torch.bool)
PADDING[1, :3] = False
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
causal, bidirectional = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
window = masking_utils.sliding_window_causal_mask_function(4)
chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long))


def packed(function):
    documents = masking_utils.find_packed_sequence_indices(POSITIONS)
    if hasattr(masking_utils, "remap_positions_for_packed_sequence"):  # transformers 5.18 and later
        function = masking_utils.remap_positions_for_packed_sequence(function, POSITIONS)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(documents))


EITHER = dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=True)
MASKS = {  # what is asked, what it is told by
    "causal": (asked(causal), named.Causal),
    "causal-one-query": (asked(causal, 1, 9, 8), None),
    "causal-cache": (asked(causal, 3, 9, 6), named.Causal),
    "causal-padding": (asked(causal, padding=PADDING), named.Causal),
    "causal-no-padding": (asked(causal, padding=PADDING | True), named.Causal),
    "causal-padding-cache": (asked(causal, 3, 9, 6, PADDING), named.Causal),
    "window": (asked(window, local_size=4), named.Causal),
    "window-as-wide": (asked(masking_utils.sliding_window_causal_mask_function(9), local_size=9), named.Causal),
    "window-cut-cache": (asked(window, 3, 6, 6, PADDING, local_size=4), named.Causal),
    "window-one-query": (asked(window, 1, 9, 8, local_size=4), named.Causal),
    "packed": (asked(packed(causal), allow_is_causal_skip=False), named.Causal),
    "packed-window": (asked(packed(window), local_size=4, allow_is_causal_skip=False), named.Causal),
    "packed-chunked": (asked(packed(chunked), local_size=4, allow_is_causal_skip=False), torch.Tensor),
    "chunked": (asked(chunked, local_size=4), torch.Tensor),
    "asked-for-a-mask": (asked(causal, allow_is_causal_skip=False), torch.Tensor),
    "short-padding": (asked(causal, 3, 9, 6, PADDING[:, :8]), torch.Tensor),
    "bidirectional": (asked(bidirectional, **EITHER), None),
    "bidirectional-padding": (asked(bidirectional, 3, 9, padding=PADDING, **EITHER), torch.Tensor),
    "or": (
        asked(masking_utils.or_masks(causal, lambda b, h, q, k: (k < 2) & (q >= 0)), allow_is_causal_skip=False),
        torch.Tensor,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_say_what_those_of_eager_say(name):
    given, kind = MASKS[name]
    told = named.mask(**given)
    assert told is None if kind is None else isinstance(told, kind)
    L, S = given["q_length"], given["kv_length"]
    expected = masking_utils.sdpa_mask(**given | dict(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))
    assert torch.equal(seen(told, L, S, given["mask_function"] is not bidirectional), expected)


def test_a_layer_need_not_know_that_it_is_causal():
    """NLLB-MoE's decoder says that it is not."""
    layer, q = torch.nn.Module(), normal(2, 4, 9, 4)
    layer.is_causal = False
    got, expected = (
        named.attention(layer, q, q, q, m)[0] for m in (named.mask(**asked(causal)), seen(None, 9, 9, True))
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["SplinterModel", "LayoutLMModel"])
def test_a_layer_that_does_not_say_is_causal_if_its_mask_is(name):
    """Encoders, whose mask of all tokens is None."""
    cls, ids = getattr(transformers, name), tokens(2, L)
    config = cls.config_class(**ENCODER, vocab_size=64, max_position_embeddings=16)
    results = []
    for config._attn_implementation in ("flash_jvp", "eager"):
        torch.manual_seed(0)
        results.append(cls(config).double().eval()(ids).last_hidden_state)
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_padding_that_is_mapped_is_not_read():
    count = lambda padding: named.mask(**asked(causal, padding=padding[None] & PADDING[:, :9])).keys.sum()
    assert vmap(count)(PADDING[:, :9]).tolist() == [15, 12]


@pytest.fixture
def linear(monkeypatch):
    """No mask of L × S is made."""

    def refuse(**_):
        raise AssertionError("a mask was made")

    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, "sdpa", refuse)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("by", ["positions", "lengths", "both"])
def test_packed_sequences(name, by, linear):
    if (name, by) == ("gpt-oss", "positions"):
        pytest.skip("a model that does not tell its mask of positions, eager or not")
    model, ids, parts = model_of(name), tokens(1, L), (4, 1, 6)
    expected = torch.cat([results(model, dict(input_ids=part)) for part in ids.split(parts, 1)], 1)
    ends = torch.tensor([0, *parts]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in parts])[None]
    lengths = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends.clone(), max_length_q=6, max_length_k=6)
    given = dict(input_ids=ids, position_ids=positions)
    if by == "lengths":  # positions that do not tell, and are right
        model.get_decoder().rotary_emb.register_forward_pre_hook(
            lambda _, args, named: ((args[0], positions), {}), with_kwargs=True
        )
        given = dict(input_ids=ids)
    got = results(model, given | (dict() if by == "positions" else lengths))
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("batch", [1, 2])
def test_behind_the_last_packed_sequence_anything_may_stand(batch):
    shape = batch, 2, 12 // batch, 4
    q, k, v = (normal(*shape, seed=i) for i in range(3))
    written = torch.arange(12).view(batch, 1, -1, 1) < 9
    ends = torch.tensor([0, 4, 9])
    sinks, edges = normal(2), dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends)
    attend = lambda *x: named.attention(torch.nn.Module(), *x[:3], None, s_aux=x[3], **edges)[0]
    results = []
    for filler in (torch.nan, 0.0):
        x = [*(torch.where(written, a, filler) for a in (q, k, v)), sinks]
        x = [a.clone().requires_grad_() for a in x]
        o = attend(*x)
        results.append([o, *torch.autograd.grad(o, x, torch.where(written.transpose(1, 2), o.detach(), filler))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert not results[0][0].flatten(0, 1)[9:].any()


@pytest.mark.parametrize("name", ["bert", *DECODERS])
def test_padding_takes_no_mask(name, linear):
    given, counts = inputs_of(name)
    assert results(model_of(name), given, counts).isfinite().all()


# ------------------------------------------------------------------------------------------------ in use


@pytest.mark.parametrize("name", [*DECODERS, "t5"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generates_as_eager(name, cache):
    given = {n: a for n, a in inputs_of(name)[0].items() if not n.startswith("decoder")}
    options = dict(max_new_tokens=5, do_sample=False, cache_implementation=cache, disable_compile=True)
    runs = [
        model_of(name, implementation).generate(**given, **options, output_logits=True, return_dict_in_generate=True)
        for implementation in ("flash_jvp", "eager")
    ]
    for a, b in zip(*(run.logits for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_generates_with_windows_in_all_layers():
    """transformers makes the masks of a static cache before, and hands them in as one."""
    config = transformers.MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=5, pad_token_id=0,
    )  # fmt: skip
    options = dict(max_new_tokens=4, do_sample=False, cache_implementation="static", disable_compile=True)
    runs = []
    for implementation in ("flash_jvp", "eager"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        runs.append(
            model.double()
            .eval()
            .generate(tokens(2, 12) % 64, **options, output_logits=True, return_dict_in_generate=True)
        )
    for a, b in zip(*(run.logits for run in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_generates_with_an_encoder():
    """Of which a static cache's mask, made before, takes another way."""
    config = transformers.BertConfig(**ENCODER, vocab_size=64, max_position_embeddings=16, pad_token_id=0)
    options = dict(max_new_tokens=3, do_sample=False, cache_implementation="static", disable_compile=True)
    given, logits = inputs_of("bert")[0], []
    for config._attn_implementation in ("flash_jvp", "eager"):
        torch.manual_seed(0)
        model = transformers.BertLMHeadModel(config).double().eval()
        run = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
        logits.append(torch.stack(run.logits))
    torch.testing.assert_close(*logits, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", DECODERS)
def test_a_prompt_in_pieces(name):
    ids = tokens(2, L)
    model, cache = model_of(name), transformers.DynamicCache(config=model_of(name).config)
    pieces = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split((5, 4, 2), 1)]
    expected = results(model_of(name, "eager"), dict(input_ids=ids))
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt-oss", "t5"])
def test_checkpointing(name):
    given, counts = inputs_of(name)

    def gradients(implementation, checkpointed):
        model = model_of(name, implementation, **dict.fromkeys(RATES[name], 0.0)).train()
        if checkpointed:
            model.gradient_checkpointing_enable(dict(use_reentrant=False))
        results(model, given, counts).sin().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    launched()
    got = gradients("flash_jvp", True)
    assert launched() == "F" * 2 * MODELS[name][2] + "B" * MODELS[name][2]
    assert_same(got, gradients("eager", False))


RATES = {
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "llama": ("attention_dropout",),
    "gpt-oss": ("attention_dropout",),
    "t5": ("dropout_rate",),
}


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_dropout(rate):
    given, counts = inputs_of("llama")
    model = model_of("llama", attention_dropout=rate).train()
    torch.manual_seed(0)
    first = results(model, given, counts)
    torch.manual_seed(0)
    assert torch.equal(first, results(model, given, counts))
    if rate == 1:
        eager = model_of("llama", "eager", attention_dropout=rate).train()
        torch.testing.assert_close(first, results(eager, given, counts))
    else:
        assert not torch.allclose(first, results(model, given, counts))
        torch.testing.assert_close(results(model.eval(), given, counts), results(model_of("llama"), given, counts))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_compiled(name):
    given, counts = inputs_of(name)
    model, eager = model_of(name), model_of(name, "eager")
    at = {n: p.detach() for n, p in model.named_parameters()}
    run = torch.compile(lambda p: grad(loss_of(model, given, counts))(p), backend="aot_eager")
    launched()
    got = run(at)
    assert launched() == "F" * MODELS[name][2] + "B" * MODELS[name][2]
    assert_same(got, grad(loss_of(eager, given, counts))(at))


# ------------------------------------------------------------------------------------------------ the name


def test_the_name_is_set_and_unset():
    given, counts = inputs_of("llama")
    model = model_of("llama", "eager")
    expected = results(model, given, counts)
    model.set_attn_implementation("flash_jvp")
    launched()
    torch.testing.assert_close(results(model, given, counts), expected, rtol=1e-9, atol=1e-9)
    assert launched() == "FF"
    model.set_attn_implementation("sdpa")
    results(model, given, counts)
    assert launched() == ""


def test_from_pretrained(tmp_path):
    model_of("gpt-oss").save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_jvp")
    assert model.config._attn_implementation == "flash_jvp"


def test_parts_of_a_model_have_names_of_their_own():
    config = transformers.LlavaConfig(
        vision_config=dict(ENCODER, model_type="clip_vision_model", image_size=12, patch_size=4),
        text_config=dict(DECODER, model_type="llama"),
    )
    config._attn_implementation = {"text_config": "flash_jvp", "vision_config": "eager"}
    model = transformers.LlavaForConditionalGeneration(config)
    parts = model.config.text_config, model.config.vision_config
    assert [part._attn_implementation for part in parts] == ["flash_jvp", "eager"]


CHAINS = torch.arange(L).expand(2, L) // 4
REFUSE_FLASH = {  # class, configuration, arguments beside `input_ids`, what transformers says of a name with "flash"
    "sequence-id": ("EsmcModel", ENCODER | dict(vocab_size=64), dict(sequence_id=CHAINS), "`sequence_id` .* not supported"),
    "prefix-lm": (
        "HrmTextForCausalLM", DECODER | dict(prefix_lm=True, H_cycles=1, L_cycles=1),
        dict(token_type_ids=(CHAINS < 2).long()), "not supported when `config.prefix_lm=True`",
    ),
    "chunks": (
        "Llama4ForCausalLM",
        DECODER | dict(attention_chunk_size=4, intermediate_size_mlp=24, num_local_experts=2, moe_layers=[]), {},
        "cannot handle chunked attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSE_FLASH)
def test_a_name_without_flash(name, monkeypatch):
    cls, config, arguments, refusal = REFUSE_FLASH[name]
    if not hasattr(transformers, cls):
        pytest.skip("this version of transformers has no such model")
    monkeypatch.setitem(MODELS, name, (cls, config, 2))
    given, counts = dict(input_ids=tokens(2, L), **arguments), torch.ones(2, L, dtype=torch.bool)
    launched()
    got = everything(model_of(name, "jvp_attention"), given, counts)
    assert set(launched()) == {"D", "S"}
    assert_same(got, everything(model_of(name, "eager"), given, counts))
    with pytest.raises(ValueError, match=refusal):
        results(model_of(name, "flash_jvp"), given)


def test_a_model_that_does_not_call_by_name():
    config = transformers.BigBirdPegasusConfig(encoder_layers=1, decoder_layers=1, d_model=16, vocab_size=64)
    config._attn_implementation = "flash_jvp"
    with pytest.raises(ValueError, match="BigBirdPegasusModel does not call attention by name"):
        transformers.BigBirdPegasusModel(config)
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global"], 2]]
    )
    config._attn_implementation = "flash_jvp"
    with pytest.raises(ValueError, match=r"GPTNeo.* does not call attention by name.*torch_bridge\.patch"):
        transformers.GPTNeoForCausalLM(config)


Q = normal(1, 4, 5, 4)
REFUSED = {
    "weights": ("`output_attentions` is not served: the kernels never", Q, dict(output_attentions=True)),
    "paged": ("`block_table` is not served: generate", Q, dict(block_table=torch.zeros(1, 1))),
    "packed-cache": (
        "causal packed sequences are served only without a cache",
        Q[:, :, :2],
        dict(cu_seq_lens_q=torch.tensor([0, 2]), cu_seq_lens_k=torch.tensor([0, 5])),
    ),
}


@pytest.mark.parametrize(("text", "query", "arguments"), REFUSED.values(), ids=REFUSED)
def test_refused(text, query, arguments):
    with pytest.raises(ValueError, match=text):
        named.attention(torch.nn.Module(), query, Q, Q, None, **arguments)


def test_what_models_hand_to_kernels_called_flash():
    """Two axes of padding, windows, sequences in one row or in several, and causality or none."""
    layer, q, k = torch.nn.Module(), normal(2, 4, 6, 4), normal(2, 2, 6, 4)
    layer.is_causal = True
    attend = lambda *x, **arguments: named.attention(layer, *x, **arguments)[0]
    padding = torch.ones(2, 6, dtype=torch.long)
    padding[1, 4:] = 0
    lower, near = torch.ones(6, 6).tril().bool(), (torch.arange(6)[:, None] - torch.arange(6)).abs() < 3
    sequences = torch.tensor([[0, 0, 1, 1, 1, 1], [2, 2, 2, 2, 2, 3]])
    ends = torch.tensor([0, 2, 6, 11, 12])
    same = (sequences[:, :, None] == sequences[:, None])[:, None]
    for given, mask in (
        (dict(attention_mask=padding), lower & padding.bool()[:, None, None]),
        (dict(attention_mask=padding, is_causal=False), padding.bool()[:, None, None]),
        (dict(attention_mask=None, sliding_window=3), lower & near),
        (dict(attention_mask=None, sliding_window=3, is_causal=False), near),
        (dict(attention_mask=None, cu_seq_lens_q=ends, cu_seq_lens_k=ends), lower & same),
        (dict(attention_mask=None, cu_seq_lens_q=ends, cu_seq_lens_k=ends, is_causal=False), same),
    ):
        mask = mask.expand(2, 1, 6, 6)
        torch.testing.assert_close(attend(q, k, k, **given), attend(q, k, k, mask), rtol=1e-12, atol=1e-12)
        bias = normal(1, 4, 6, 6)
        got, expected = (attend(q, k, k, **g, position_bias=bias) for g in (given, dict(attention_mask=mask)))
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    first = attend(q[:, :, :4], k, k, None, position_bias=normal(1, 4, 4, 6))  # of a static cache
    expected = attend(q[:, :, :4], k[:, :, :4], k[:, :, :4], None, position_bias=normal(1, 4, 4, 6)[..., :4])
    torch.testing.assert_close(first, expected, rtol=0, atol=0)

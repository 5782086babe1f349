#!/usr/bin/env python3
"""Models of the transformers package and of ballast change places, and give the same logits in both.

usage: hugging_face_test.py BALLAST LOGITS   (the programs; tests/cli/logits.cpp)
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "build" / "python"))  # where ./dev test puts packages
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import safetensors.torch
    import torch
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
except ImportError as missing:
    print(f"skip: {missing} (./dev test installs it; or: pip install transformers safetensors)")
    sys.exit(77)

BALLAST, LOGITS = (str(pathlib.Path(program).resolve()) for program in sys.argv[1:3])
VOCABULARY = 256
NO_WORDS = {"bos_token_id": None, "eos_token_id": None}
GPT2 = dict(vocab_size=VOCABULARY, n_positions=24, n_embd=32, n_layer=2, n_head=4, **NO_WORDS)
LLAMA = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=44,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=24,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    **NO_WORDS,
)
# Sections "model" of ballast's own.
OWN_GPT2 = {"layers": 2, "width": 32, "heads": 4, "context": 24}
OWN_LLAMA = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "key_heads": 2,
    "context": 24,
    "norm": "rms",
    "norm_eps": 1e-6,
    "positions": "rotary",
    "mlp": "swiglu",
    "bias": False,
    "tied_head": False,
}
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def random_model(family, **options):
    """Weights that differ enough for every one of them to show in the logits, norms and biases too."""
    torch.manual_seed(7)
    model = (
        GPT2LMHeadModel(GPT2Config(**{**GPT2, **options}))
        if family == "gpt2"
        else LlamaForCausalLM(LlamaConfig(**{**LLAMA, **options}))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model.eval()


def load(folder, dtype=torch.float32):
    cls = {"gpt2": GPT2LMHeadModel, "llama": LlamaForCausalLM}[
        json.loads((folder / "config.json").read_text())["model_type"]
    ]
    model, info = cls.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


class Exchange(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "text.txt").write_text("".join(f"line {i * i % 97}\n" for i in range(400)))
        torch.manual_seed(3)
        self.tokens = torch.randint(0, VOCABULARY, (2, 24))
        safetensors.torch.save_file({"tokens": self.tokens}, self.folder / "tokens.safetensors")

    def ballast(self, *words, status=0, ranks=1):
        launcher = (
            []
            if ranks == 1
            else [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--local_addr",
                "127.0.0.1",
                "--nproc_per_node",
                str(ranks),
                "--no_python",
            ]
        )
        done = subprocess.run(
            [*launcher, BALLAST, *words],
            cwd=self.folder,
            text=True,
            capture_output=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def logits(self, weights):
        """What ballast computes from a folder of either kind."""
        out = self.folder / "logits.safetensors"
        subprocess.run([LOGITS, self.folder / weights, self.folder / "tokens.safetensors", out], check=True)
        return safetensors.torch.load_file(out)["logits"]

    def expect_same(self, ours, model, tolerance=1e-5):
        with torch.no_grad():
            theirs = model(self.tokens).logits.float()
        self.assertEqual(ours.shape, theirs.shape)
        self.assertGreater(theirs.abs().max().item(), 0.1)  # else anything would be close
        self.assertLess((ours - theirs).abs().max().item(), tolerance)

    def run_file(self, name, model, **engine):
        run = {
            "engine": {
                "train_micro_batch_size_per_gpu": 2,
                "managed_gradient_accumulation": False,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                "steps_per_print": 0,
                **engine,
            },
            "data": {"path": "text.txt", "held_out": 0},
            "train": {"steps": 3, "device": "cpu"},
        }
        if model:
            run["model"] = model
        (self.folder / name).write_text(json.dumps(run))
        return name

    def trained(self, model, to="own", **engine):
        """A checkpoint of ballast's own model, a few steps from random weights."""
        self.ballast("train", "--config", self.run_file("own.json", model, **engine), "--save", to)
        return to

    # transformers -> ballast
    def test_reads_what_transformers_writes(self):
        for name, model in {
            "gpt2": random_model("gpt2"),
            "gpt2-untied": random_model("gpt2", tie_word_embeddings=False, n_inner=40),
            "llama": random_model("llama"),
            "llama-tied": random_model(
                "llama",
                tie_word_embeddings=True,
                attention_bias=True,
                mlp_bias=True,
                rope_parameters={"rope_type": "default", "rope_theta": 500.0},
            ),
        }.items():
            with self.subTest(name):
                model.save_pretrained(self.folder / name)
                self.expect_same(self.logits(name), model)
                self.ballast("checkpoint", "import", name, "--to", name + "-saved")
                self.expect_same(self.logits(name + "-saved"), model)
                self.assertIn("as written", self.ballast("checkpoint", "verify", name + "-saved"))

    def test_reads_shards_and_half_precision(self):
        model = random_model("llama").to(torch.bfloat16)
        model.save_pretrained(self.folder / "shards", max_shard_size="30KB")
        self.assertGreater(len(list((self.folder / "shards").glob("*.safetensors"))), 2)
        self.expect_same(self.logits("shards"), load(self.folder / "shards"))

    def test_reads_the_bare_decoder_without_its_first_word(self):
        model = random_model("gpt2")
        model.transformer.save_pretrained(self.folder / "bare")
        names = safetensors.torch.load_file(self.folder / "bare" / "model.safetensors").keys()
        self.assertIn("wte.weight", names)
        self.expect_same(self.logits("bare"), model)

    def test_a_run_starts_from_them(self):
        model = random_model("llama")
        model.save_pretrained(self.folder / "hf")
        still = {"optimizer": {"type": "AdamW", "params": {"lr": 0, "weight_decay": 0}}, "bf16": {"enabled": True}}
        run = self.run_file("run.json", None, **still)  # the model is theirs
        self.assertIn("weights of hf", self.ballast("train", "--config", run, "--init", "hf", "--save", "kept"))
        self.expect_same(self.logits("kept"), model)
        again = self.ballast("train", "--config", run, "--init", "kept", "--save", "kept-again")
        self.assertIn("weights of kept", again)
        self.expect_same(self.logits("kept-again"), model)

    def test_ranks_that_shard_it_start_from_it_and_give_it_back(self):
        model = random_model("llama")
        model.save_pretrained(self.folder / "hf")
        run = self.run_file(
            "run.json",
            None,
            optimizer={"type": "AdamW", "params": {"lr": 0, "weight_decay": 0}},
            zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}},
        )
        self.ballast("train", "--config", run, "--init", "hf", "--save", "kept", ranks=2)
        manifest = json.loads((self.folder / "kept" / "global_step3" / "manifest.json").read_text())
        self.assertEqual(manifest["world"], 2)
        self.ballast("checkpoint", "export", "kept", "--to", "out")
        for name, value in load(self.folder / "out").state_dict().items():
            self.assertTrue(torch.equal(value, model.state_dict()[name]), name)

    # ballast -> transformers
    def test_transformers_reads_what_ballast_writes(self):
        for name, model in {
            "gpt2": OWN_GPT2,
            "gpt2-untied": {**OWN_GPT2, "tied_head": False, "mlp_width": 40},
            "llama": OWN_LLAMA,
            "llama-tied": {**OWN_LLAMA, "tied_head": True, "bias": True},
        }.items():
            with self.subTest(name):
                saved = self.trained(
                    model, name + "-saved", zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}
                )
                self.ballast("checkpoint", "export", saved, "--to", name)
                self.assertEqual(
                    sorted(file.name for file in (self.folder / name).iterdir()), ["config.json", "model.safetensors"]
                )
                self.expect_same(self.logits(saved), load(self.folder / name))
                self.expect_same(self.logits(name), load(self.folder / name))

    def test_writes_half_precision_and_shards(self):
        saved = self.trained(OWN_LLAMA)
        self.ballast("checkpoint", "export", saved, "--to", "whole")
        said = self.ballast("checkpoint", "export", saved, "--to", "half", "--dtype", "bf16", "--max-shard-size", "10K")
        self.assertIn("BF16", said)
        index = json.loads((self.folder / "half" / "model.safetensors.index.json").read_text())
        self.assertGreater(len(set(index["weight_map"].values())), 2)
        for file in (self.folder / "half").glob("*.safetensors"):
            tensors = safetensors.torch.load_file(file)
            self.assertTrue(len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 10240, file)
        whole, half = load(self.folder / "whole"), load(self.folder / "half", torch.bfloat16)
        self.assertEqual(half.config.dtype, torch.bfloat16)
        for name, value in whole.state_dict().items():  # to nearest, as PyTorch rounds
            self.assertTrue(torch.equal(value.to(torch.bfloat16), half.state_dict()[name]), name)
        self.expect_same(self.logits("half"), load(self.folder / "half"))

    def test_a_ballast_model_comes_back_bit_for_bit(self):
        saved = self.trained(OWN_GPT2)
        self.ballast("checkpoint", "export", saved, "--to", "there")
        self.ballast("checkpoint", "import", "there", "--to", "back")
        self.assertTrue(torch.equal(self.logits("back"), self.logits(saved)))

    def peak_of(self, *words):
        """MiB that the program has held at most. Started by a small process: Linux counts the starter's memory too."""
        starter = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=sys.stderr); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        done = subprocess.run(
            [sys.executable, "-c", starter, BALLAST, *words],
            cwd=self.folder,
            text=True,
            check=True,
            capture_output=True,
        )
        return int(done.stdout) / 1024

    def test_takes_memory_for_the_largest_tensor_alone(self):
        peaks = {}
        for layers in (1, 50):  # 3 and 157 MiB, in tensors of 1 MiB at most
            model = GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_embd": 256, "n_layer": layers}))
            model.save_pretrained(self.folder / f"hf{layers}")
            peaks[layers] = (
                self.peak_of("checkpoint", "import", f"hf{layers}", "--to", f"saved{layers}"),
                self.peak_of("checkpoint", "export", f"saved{layers}", "--to", f"out{layers}"),
            )
        for few, many in zip(peaks[1], peaks[50]):
            self.assertLess(many - few, 80, peaks)

    # what doesn't fit
    def test_names_everything_that_does_not_fit(self):
        model = random_model("gpt2")
        model.save_pretrained(self.folder / "hf")
        file = self.folder / "hf" / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        del tensors["transformer.h.0.ln_1.bias"]
        tensors["transformer.h.1.ln_2.weight"] = torch.ones(31)
        tensors["transformer.h.2.ln_1.bias"] = torch.ones(32)
        safetensors.torch.save_file(tensors, file)
        said = self.ballast("checkpoint", "import", "hf", "--to", "no", status=2)
        self.assertIn(
            "they lack transformer.h.0.ln_1.bias; the model has no transformer.h.2.ln_1.bias; "
            "of other shapes are transformer.h.1.ln_2.weight ([31], want [32])",
            said,
        )
        self.assertFalse((self.folder / "no").exists())

    def test_a_tied_head_that_is_there_has_to_be_the_embedding(self):
        random_model("gpt2").save_pretrained(self.folder / "hf")
        file = self.folder / "hf" / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
        safetensors.torch.save_file(tensors, file)
        self.expect_same(self.logits("hf"), random_model("gpt2"))
        tensors["lm_head.weight"] += 1
        safetensors.torch.save_file(tensors, file)
        self.assertIn(
            "the head is not the embedding", self.ballast("checkpoint", "import", "hf", "--to", "no", status=2)
        )

    def test_a_run_file_of_another_model_is_a_contradiction(self):
        random_model("llama").save_pretrained(self.folder / "hf")
        run = self.run_file("run.json", {"width": 48, "context": 12})
        self.assertIn(
            "contradiction (model.width = 48, that of the weights in hf = 32; leave the key out)",
            self.ballast("train", "--config", run, "--init", "hf", status=2),
        )
        run = self.run_file("run.json", {"context": 12, "heads": 4})  # rotary positions have no length of their own
        self.assertIn("done", self.ballast("train", "--config", run, "--init", "hf"))

    def test_leaves_what_is_there_alone(self):
        saved = self.trained(OWN_GPT2)
        (self.folder / "taken").mkdir()
        self.assertIn(
            "the folder exists (taken;", self.ballast("checkpoint", "export", saved, "--to", "taken", status=2)
        )
        mixed = self.run_file("mixed.json", {**OWN_GPT2, "norm": "rms"})
        self.ballast("train", "--config", mixed, "--save", "mixed")
        self.assertIn(
            "neither a GPT-2 nor a Llama", self.ballast("checkpoint", "export", "mixed", "--to", "out", status=2)
        )
        self.assertEqual([file.name for file in self.folder.glob("*out*")], [])
        self.assertIn("no weights here", self.ballast("train", "--config", mixed, "--init", "taken", status=1))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:])

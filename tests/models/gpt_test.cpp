#include "ballast/models/gpt.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "ballast/base/error.h"
#include "ballast/models/skeleton.h"
#include "tests/models/small.h"

namespace ballast::models {
namespace {

at::Tensor tokens(std::initializer_list<std::int64_t> values, std::int64_t batch) {
  return torch::tensor(std::vector<std::int64_t>(values)).view({batch, -1});
}

std::string error_of(const GptOptions& options) {
  try {
    Gpt model(options);
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "no error";
}

std::vector<GptOptions> variants() {
  GptOptions untied = small(), plain = small(), llama = small_llama();
  untied.tied_head = false;
  plain.bias = false;
  plain.mlp = MlpKind::kSwiglu;
  return {small(), untied, plain, llama};
}

TEST(Gpt, SkeletonIsTheModuleWithoutItsMemory) {
  for (const GptOptions& options : variants()) {
    Gpt model(options);
    const auto named = model->named_parameters();
    const auto outline = skeleton(options);
    const auto outlined = outline->named_parameters();
    ASSERT_EQ(named.size(), outlined.size());
    for (std::size_t i = 0; i < named.size(); ++i) {
      EXPECT_EQ(named[i].key(), outlined[i].key());
      EXPECT_EQ(named[i].value().sizes(), outlined[i].value().sizes()) << named[i].key();
      EXPECT_EQ(named[i].value().requires_grad(), outlined[i].value().requires_grad());
      EXPECT_TRUE(outlined[i].value().is_meta());
    }
    EXPECT_NE(std::dynamic_pointer_cast<torch::nn::ModuleListImpl>(outline->named_children()["blocks"]), nullptr);
  }
}

TEST(Gpt, WeightsDependOnTheSeedAlone) {
  GptOptions options = small();
  Gpt a(options);
  torch::randn({3});  // moves the global generator
  Gpt b(options);
  options.seed = 6;
  Gpt c(options);
  for (const auto& parameter : a->named_parameters())
    EXPECT_TRUE(parameter.value().equal(b->named_parameters()[parameter.key()])) << parameter.key();
  EXPECT_FALSE(a->token_embedding->weight.equal(c->token_embedding->weight));
}

TEST(Gpt, InitialisationHasThePapersSpread) {
  Gpt model(GptOptions{.vocabulary = 256, .context = 64, .layers = 8, .width = 128, .heads = 4});
  for (const auto& parameter : model->named_parameters()) {
    const std::string& name = parameter.key();
    const at::Tensor value = parameter.value().detach();
    if (name.ends_with("bias")) {
      EXPECT_EQ(value.abs().max().item<float>(), 0) << name;
    } else if (name.find("norm") != std::string::npos) {
      EXPECT_TRUE(value.equal(torch::ones_like(value))) << name;
    } else {
      const double want = name.ends_with("projection.weight") ? 0.02 / 4 : 0.02;  // sqrt(2 * 8) = 4
      EXPECT_NEAR(value.std().item<double>() / want, 1, 0.05) << name;
      EXPECT_NEAR(value.mean().item<double>() / want, 0, 0.05) << name;
    }
  }
}

// The same formula written out with plain products and softmax, from the parameters by name.
TEST(Gpt, LogitsEqualTheFormulaWrittenOut) {
  Gpt model(small());
  const auto p = [&](const std::string& name) { return model->named_parameters()[name]; };
  const at::Tensor in = tokens({1, 4, 9, 0, 10, 3, 3, 7, 2, 5}, 2);
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    const auto mean = x.mean(-1, true), variance = x.var(-1, false, true);
    return (x - mean) / (variance + 1e-5).sqrt() * p(name + ".weight") + p(name + ".bias");
  };
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return x.matmul(p(name + ".weight").t()) + p(name + ".bias");
  };
  const auto gelu = [](const at::Tensor& x) {
    return 0.5 * x * (1 + (std::sqrt(2 / M_PI) * (x + 0.044715 * x.pow(3))).tanh());
  };
  at::Tensor x = p("token_embedding.weight").index_select(0, in.flatten()).view({2, 5, 12}) +
                 p("position_embedding.weight").slice(0, 0, 5);
  const at::Tensor later = torch::ones({5, 5}, torch::kBool).triu(1);
  for (const std::string block : {"blocks.0.", "blocks.1."}) {
    const auto qkv = linear(norm(x, block + "attention_norm"), block + "attention.qkv").chunk(3, -1);
    std::vector<at::Tensor> heads;
    for (int h = 0; h < 3; ++h) {
      const auto q = qkv[0].slice(-1, 4 * h, 4 * h + 4), k = qkv[1].slice(-1, 4 * h, 4 * h + 4),
                 v = qkv[2].slice(-1, 4 * h, 4 * h + 4);
      const auto scores = q.matmul(k.transpose(1, 2)) / 2;  // sqrt(4)
      heads.push_back(scores.masked_fill(later, -INFINITY).softmax(-1).matmul(v));
    }
    x = x + linear(at::cat(heads, -1), block + "attention.projection");
    x = x + linear(gelu(linear(norm(x, block + "mlp_norm"), block + "mlp.expand")), block + "mlp.projection");
  }
  const at::Tensor want = norm(x, "final_norm").matmul(p("token_embedding.weight").t());
  EXPECT_TRUE(model->forward(in).allclose(want, 1e-4, 1e-6));

  const at::Tensor targets = tokens({4, 9, 0, 10, 6, 3, 7, 2, 5, 1}, 2);
  const at::Tensor nats = -want.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean();
  EXPECT_NEAR(model->loss(in, targets).item<double>(), nats.item<double>(), 1e-5);
}

TEST(Gpt, NoPositionSeesWhatFollows) {
  Gpt model(small());
  const at::Tensor a = model->forward(tokens({1, 2, 3, 4, 5, 6}, 1));
  const at::Tensor b = model->forward(tokens({1, 2, 3, 4, 9, 8}, 1));
  EXPECT_TRUE(a.slice(1, 0, 4).allclose(b.slice(1, 0, 4), 1e-5, 1e-7));
  EXPECT_FALSE(a.slice(1, 4, 6).allclose(b.slice(1, 4, 6), 1e-5, 1e-7));
}

TEST(Gpt, HalfPrecisionWeightsStillGiveALossInFp32) {
  Gpt model(small());
  const at::Tensor in = tokens({1, 2, 3, 4, 5, 6}, 1), out = tokens({2, 3, 4, 5, 6, 7}, 1);
  const double exact = model->loss(in, out).item<double>();
  model->to(torch::kBFloat16);
  const at::Tensor loss = model->loss(in, out);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_NEAR(loss.item<double>(), exact, 0.02);
}

TEST(Gpt, BlockRunnerRunsEveryBlockAndChangesNothing) {
  Gpt model(small());
  const at::Tensor in = tokens({1, 2, 3, 4, 5, 6}, 1), out = tokens({2, 3, 4, 5, 6, 7}, 1);
  model->loss(in, out).backward();
  std::vector<at::Tensor> plain;
  for (const auto& parameter : model->parameters()) plain.push_back(parameter.grad().clone());
  model->zero_grad();
  int runs = 0;
  model->set_block_runner([&](const auto& block, const at::Tensor& x) { return ++runs, block(x); });
  model->loss(in, out).backward();
  EXPECT_EQ(runs, 2);
  for (std::size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(plain[i].equal(model->parameters()[i].grad())) << i;
}

TEST(Gpt, DropoutActsInTrainingOnly) {
  GptOptions options = small();
  options.dropout = 0.5;
  Gpt model(options);
  const at::Tensor in = tokens({1, 2, 3, 4, 5, 6}, 1);
  EXPECT_FALSE(model->forward(in).equal(model->forward(in)));
  model->eval();
  EXPECT_TRUE(model->forward(in).equal(model->forward(in)));
}

TEST(Gpt, ContradictingOptionsAndWrongShapesAreNamed) {
  GptOptions options = small();
  options.width = 13;
  EXPECT_EQ(error_of(options), "[models.gpt] width must be a multiple of heads (width = 13, heads = 3)");
  options = small();
  options.layers = 0;
  EXPECT_EQ(error_of(options), "[models.gpt] must be at least 1 (layers = 0)");
  options = small();
  options.key_heads = 2;
  EXPECT_EQ(error_of(options), "[models.gpt] heads must be a multiple of key_heads (heads = 3, key_heads = 2)");
  options = small();
  options.width = 15;
  options.positions = PositionKind::kRotary;
  EXPECT_EQ(error_of(options), "[models.gpt] rotary positions need heads of an even width (width = 15, heads = 3)");
  options = small();
  options.mlp_width = -1;
  EXPECT_EQ(error_of(options), "[models.gpt] must not be negative (key_heads = 0, mlp_width = -1)");
  options = small();
  options.norm_eps = 0;
  EXPECT_EQ(error_of(options), "[models.gpt] must be greater than 0 (rope_theta = 10000, norm_eps = 0)");
  options = small();
  options.dropout = 1;
  EXPECT_EQ(error_of(options), "[models.gpt] must be in [0, 1) (dropout = 1)");
  Gpt model(small());
  EXPECT_THROW(model->forward(torch::zeros({1, 9}, torch::kLong)), UseError);
  EXPECT_THROW(model->forward(torch::zeros({4}, torch::kLong)), UseError);
}

}  // namespace
}  // namespace ballast::models

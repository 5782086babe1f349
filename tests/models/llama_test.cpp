// What makes a Gpt a Llama, each held to its formula.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <map>

#include "ballast/models/generate.h"
#include "ballast/models/gpt.h"
#include "tests/models/small.h"

namespace ballast::models {
namespace {

at::Tensor some_tokens() { return torch::tensor({1, 4, 9, 0, 10, 3, 3, 7, 2, 5}).view({2, 5}).to(torch::kLong); }

TEST(Llama, HasNoBiasesNoPositionsAndFewerKeys) {
  Gpt model(small_llama());
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const auto& parameter : model->named_parameters()) shapes[parameter.key()] = parameter.value().sizes().vec();
  const std::map<std::string, std::vector<std::int64_t>> want{{"token_embedding.weight", {11, 24}},
                                                              {"blocks.0.attention_norm.weight", {24}},
                                                              {"blocks.0.attention.qkv.weight", {24 + 2 * 12, 24}},
                                                              {"blocks.0.attention.projection.weight", {24, 24}},
                                                              {"blocks.0.mlp_norm.weight", {24}},
                                                              {"blocks.0.mlp.expand.weight", {2 * 20, 24}},
                                                              {"blocks.0.mlp.projection.weight", {24, 20}},
                                                              {"blocks.1.attention_norm.weight", {24}},
                                                              {"blocks.1.attention.qkv.weight", {24 + 2 * 12, 24}},
                                                              {"blocks.1.attention.projection.weight", {24, 24}},
                                                              {"blocks.1.mlp_norm.weight", {24}},
                                                              {"blocks.1.mlp.expand.weight", {2 * 20, 24}},
                                                              {"blocks.1.mlp.projection.weight", {24, 20}},
                                                              {"final_norm.weight", {24}},
                                                              {"head.weight", {11, 24}}};
  EXPECT_EQ(shapes, want);
}

TEST(Llama, WidthOfItsMlpFollowsFromTheModels) {
  GptOptions options;
  options.width = 100;
  EXPECT_EQ(options.hidden_width(), 400);
  options.mlp = MlpKind::kSwiglu;
  EXPECT_EQ(options.hidden_width(), 320);  // 266.7 in whole 64s
  options.width = 96;
  EXPECT_EQ(options.hidden_width(), 256);
  options.mlp_width = 11;
  EXPECT_EQ(options.hidden_width(), 11);
}

// Pairs of elements as complex numbers: position p turns pair i by p theta^(-2i/width), written out number by number.
at::Tensor rotated(const at::Tensor& head, double theta) {
  at::Tensor out = head.clone();
  const std::int64_t half = head.size(-1) / 2;
  for (std::int64_t b = 0; b < head.size(0); ++b)
    for (std::int64_t p = 0; p < head.size(1); ++p)
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(p) * std::pow(theta, -static_cast<double>(i) / half);
        const double x = head[b][p][i].item<double>(), y = head[b][p][i + half].item<double>();
        out[b][p][i] = x * std::cos(angle) - y * std::sin(angle);
        out[b][p][i + half] = x * std::sin(angle) + y * std::cos(angle);
      }
  return out;
}

TEST(Llama, LogitsEqualTheFormulaWrittenOut) {
  const torch::NoGradGuard no_grad;
  Gpt model(small_llama());
  for (auto& parameter : model->named_parameters())  // norms that do something
    if (parameter.key().find("norm") != std::string::npos) parameter.value().uniform_(0.5, 1.5);
  const auto p = [&](const std::string& name) { return model->named_parameters()[name + ".weight"]; };
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x / (x.square().mean(-1, true) + 1e-3).sqrt() * p(name);
  };
  const at::Tensor in = some_tokens();
  const at::Tensor later = torch::ones({5, 5}, torch::kBool).triu(1);
  at::Tensor x = p("token_embedding").index_select(0, in.flatten()).view({2, 5, 24});
  for (const std::string block : {"blocks.0.", "blocks.1."}) {
    const at::Tensor qkv = norm(x, block + "attention_norm").matmul(p(block + "attention.qkv").t());
    const auto head = [&](int i) { return qkv.slice(-1, 6 * i, 6 * i + 6); };  // 4 of queries, 2 of keys, 2 of values
    std::vector<at::Tensor> heads;
    for (int h = 0; h < 4; ++h) {
      const at::Tensor q = rotated(head(h), 50), k = rotated(head(4 + h / 2), 50), v = head(6 + h / 2);
      heads.push_back(
          (q.matmul(k.transpose(1, 2)) / std::sqrt(6.0)).masked_fill(later, -INFINITY).softmax(-1).matmul(v));
    }
    x = x + at::cat(heads, -1).matmul(p(block + "attention.projection").t());
    const at::Tensor rows = p(block + "mlp.expand"), y = norm(x, block + "mlp_norm");
    const at::Tensor gate = y.matmul(rows.slice(0, 0, 20).t()), up = y.matmul(rows.slice(0, 20, 40).t());
    x = x + (gate * gate.sigmoid() * up).matmul(p(block + "mlp.projection").t());
  }
  const at::Tensor want = norm(x, "final_norm").matmul(p("head").t());
  EXPECT_TRUE(model->forward(in).allclose(want, 1e-4, 1e-6));
}

// The rotation of queries against keys depends on their distance alone, so what went before may be cut off together.
TEST(Llama, AttentionDependsOnDistancesAlone) {
  const GptOptions options = small_llama();
  Attention attention(options);
  const at::Tensor x = torch::randn({1, 6, 24});
  const auto rotation = [](std::int64_t from, std::int64_t length) {
    const at::Tensor rates = at::pow(50.0, at::arange(0, 6, 2, torch::kFloat) / 6).reciprocal();
    const at::Tensor angles = at::outer(at::arange(from, from + length, torch::kFloat), rates).repeat({1, 2});
    return Rotation{angles.cos(), angles.sin()};
  };
  const at::Tensor near = attention(x, rotation(0, 6)), far = attention(x, rotation(100, 6));
  EXPECT_TRUE(near.allclose(far, 1e-4, 1e-5));
  EXPECT_FALSE(near.allclose(attention(x, Rotation{}), 1e-3, 1e-4));
}

TEST(Llama, KeysOfTheirOwnForEachHeadAreWhatSharedOnesAreWrittenTwice) {
  const torch::NoGradGuard no_grad;
  GptOptions options = small_llama();
  Gpt shared(options);
  options.key_heads = 0;
  Gpt own(options);
  for (auto& parameter : own->named_parameters()) {
    const at::Tensor from = shared->named_parameters()[parameter.key()];
    if (parameter.key().find("qkv") == std::string::npos) {
      parameter.value().copy_(from);
      continue;
    }
    std::vector<at::Tensor> rows{from.slice(0, 0, 24)};
    for (int head : {4, 4, 5, 5, 6, 6, 7, 7}) rows.push_back(from.slice(0, 6 * head, 6 * head + 6));
    parameter.value().copy_(at::cat(rows));
  }
  EXPECT_TRUE(own->forward(some_tokens()).allclose(shared->forward(some_tokens()), 1e-5, 1e-7));
}

TEST(Llama, TrainsInHalfPrecisionAndGenerates) {
  Gpt model(small_llama());
  const at::Tensor in = some_tokens();
  const double exact = model->loss(in, in).item<double>();
  model->to(torch::kBFloat16);
  const at::Tensor loss = model->loss(in, in);
  EXPECT_NEAR(loss.item<double>(), exact, 0.02);
  loss.backward();
  for (const auto& parameter : model->named_parameters()) {
    ASSERT_TRUE(parameter.value().grad().defined()) << parameter.key();
    EXPECT_TRUE(parameter.value().grad().isfinite().all().item<bool>()) << parameter.key();
  }
  EXPECT_EQ(generate(*model, {1, 2}, {.count = 12, .temperature = 0}).size(), 12u);
}

}  // namespace
}  // namespace ballast::models

#include "ballast/models/generate.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <set>

#include "ballast/base/error.h"

namespace ballast::models {
namespace {

GptOptions small() { return {.vocabulary = 7, .context = 8, .layers = 1, .width = 16, .heads = 2, .seed = 1}; }

// A model that has learned 0 1 2 3 4 5 6 0 1 ... must go on with it, past its context.
TEST(Generate, ContinuesWhatTheModelHasLearned) {
  Gpt model(small());
  std::vector<torch::Tensor> inputs, targets;
  for (int start = 0; start < 7; ++start) {
    inputs.push_back(torch::arange(start, start + 8).remainder(7));
    targets.push_back(torch::arange(start + 1, start + 9).remainder(7));
  }
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  const auto in = torch::stack(inputs), out = torch::stack(targets);
  double loss = 0;
  for (int step = 0; step < 150; ++step) {
    optimizer.zero_grad();
    auto value = model->loss(in, out);
    value.backward();
    optimizer.step();
    loss = value.item<double>();
  }
  EXPECT_LT(loss, 0.05);
  const auto text = generate(*model, {3}, {.count = 20, .temperature = 0});
  ASSERT_EQ(text.size(), 20u);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(text[i], (4 + i) % 7) << i;
}

TEST(Generate, DependsOnTheSeedAndLeavesTheModeAlone) {
  GptOptions options = small();
  options.dropout = 0.5;
  Gpt model(options);
  model->train();
  const auto a = generate(*model, {1, 2}, {.count = 30, .seed = 9});
  const auto b = generate(*model, {1, 2}, {.count = 30, .seed = 9});
  const auto c = generate(*model, {1, 2}, {.count = 30, .seed = 10});
  EXPECT_EQ(a, b);
  EXPECT_NE(a, c);
  EXPECT_TRUE(model->is_training());
  for (const auto& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(Generate, TopKDrawsOnlyTheLikeliest) {
  Gpt model(small());
  EXPECT_EQ(generate(*model, {1}, {.count = 12, .top_k = 1}), generate(*model, {1}, {.count = 12, .temperature = 0}));
  // From one token the first draw has one distribution: over many seeds, top_k 3 shows exactly its 3 likeliest tokens.
  const auto order = model->forward(torch::full({1, 1}, 1, torch::kLong)).flatten().argsort(0, true);
  std::set<std::int64_t> likeliest, drawn;
  for (int i = 0; i < 3; ++i) likeliest.insert(order[i].item<std::int64_t>());
  for (std::uint64_t seed = 0; seed < 60; ++seed)
    drawn.insert(generate(*model, {1}, {.count = 1, .top_k = 3, .seed = seed})[0]);
  EXPECT_EQ(drawn, likeliest);
}

TEST(Generate, RefusesWhatHasNoMeaning) {
  Gpt model(small());
  EXPECT_THROW(generate(*model, {}, {.count = 1}), UseError);
  EXPECT_THROW(generate(*model, {1}, {.count = -1}), UseError);
  EXPECT_THROW(generate(*model, {1}, {.count = 1, .temperature = -0.5}), UseError);
  EXPECT_EQ(generate(*model, {1}, {.count = 0}).size(), 0u);
}

}  // namespace
}  // namespace ballast::models

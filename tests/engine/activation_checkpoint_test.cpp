#include "ballast/engine/activation_checkpoint.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "ballast/base/error.h"

namespace ballast {
namespace {

/// Two linear layers with what a recomputation could get wrong between them.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(double dropout = 0.5) : dropout_rate(dropout) {
    first = register_module("first", torch::nn::Linear(8, 16));
    second = register_module("second", torch::nn::Linear(16, 8));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + second(torch::dropout(torch::gelu(first(x)), dropout_rate, is_training()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  double dropout_rate;
  int calls = 0;
};
TORCH_MODULE(Block);

Block make_block(double dropout = 0.5) {
  torch::manual_seed(1);
  return Block(dropout);
}

at::Tensor make_input(bool requires_grad = true) {
  return torch::sin(torch::arange(24, torch::kFloat).view({3, 8})).detach().requires_grad_(requires_grad);
}

struct Outcome {
  at::Tensor output;
  std::vector<at::Tensor> gradients;  // of the parameters, then of the input if it has one
  at::Tensor next_random;             // what the generator gives afterwards
};

/// Forward, backward of a weighted sum, and all that came of it. call: runs the block on the input.
template <class Call>
Outcome run(Block block, const at::Tensor& input, Call call) {
  block->zero_grad();
  input.mutable_grad() = at::Tensor();
  torch::manual_seed(7);
  Outcome outcome;
  outcome.output = call(input);
  (outcome.output * torch::arange(8)).sum().backward();
  for (const at::Tensor& parameter : block->parameters()) outcome.gradients.push_back(parameter.grad().clone());
  if (input.grad().defined()) outcome.gradients.push_back(input.grad().clone());
  outcome.next_random = torch::rand({4});
  return outcome;
}

void expect_same_bits(const Outcome& got, const Outcome& want) {
  EXPECT_TRUE(at::equal(got.output, want.output));
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (std::size_t i = 0; i < got.gradients.size(); ++i) {
    EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i])) << "gradient " << i;
  }
  EXPECT_TRUE(at::equal(got.next_random, want.next_random)) << "the generator is elsewhere";
}

template <class E>
std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(ActivationCheckpoint, GradientsHaveTheBitsOfAPlainRunDropoutIncluded) {
  Block block = make_block();
  const at::Tensor x = make_input();
  const Outcome plain = run(block, x, [&](const at::Tensor& in) { return block(in); });
  block->calls = 0;
  expect_same_bits(run(block, x, [&](const at::Tensor& in) { return checkpoint(block, in); }), plain);
  EXPECT_EQ(block->calls, 2);
}

TEST(ActivationCheckpoint, SeveralInARowReplayEachTheirOwnRandomNumbers) {
  Block block = make_block();
  const at::Tensor x = make_input();
  const auto thrice = [&](auto step) { return run(block, x, [&](at::Tensor in) { return step(step(step(in))); }); };
  expect_same_bits(thrice([&](const at::Tensor& in) { return checkpoint(block, in); }),
                   thrice([&](const at::Tensor& in) { return block(in); }));
}

TEST(ActivationCheckpoint, KeepsNoActivations) {
  // What fn computes on the way dies with the first call: a weak reference to it finds nothing.
  const at::Tensor x = make_input();
  c10::weak_intrusive_ptr<at::TensorImpl> hidden = c10::weak_intrusive_ptr<at::TensorImpl>::reclaim(nullptr);
  const at::Tensor y = checkpoint(
      [&](const at::Tensor& in) {
        const at::Tensor inside = in.exp();
        hidden = c10::weak_intrusive_ptr<at::TensorImpl>(inside.getIntrusivePtr());
        return inside.sin();
      },
      x);
  EXPECT_TRUE(hidden.expired());
  y.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), (x.exp().cos() * x.exp()).detach()));
}

TEST(ActivationCheckpoint, Nested) {
  Block block = make_block();
  const at::Tensor x = make_input();
  const auto plain = [&](const at::Tensor& in) { return block(block(in)); };
  const auto inner = [&](const at::Tensor& in) { return checkpoint(block, in); };
  const auto nested = [&](const at::Tensor& in) {
    return checkpoint([&](const at::Tensor& y) { return inner(torch::dropout(inner(y), 0.0, true)); }, in);
  };
  expect_same_bits(run(block, x, nested),
                   run(block, x, [&](const at::Tensor& in) { return block(torch::dropout(block(in), 0.0, true)); }));
  expect_same_bits(run(block, x,
                       [&](const at::Tensor& in) {
                         return checkpoint([&](const at::Tensor& y) { return checkpoint(inner, inner(y)); }, in);
                       }),
                   run(block, x, plain));
}

TEST(ActivationCheckpoint, SeveralBackwardsOverOneGraph) {
  Block block = make_block();
  const auto twice = [&](auto forward) {
    block->zero_grad();
    torch::manual_seed(3);
    const at::Tensor y = forward(make_input()).sum();
    y.backward({}, /*retain_graph=*/true);
    (y * 2).backward();
    return block->first->weight.grad().clone();
  };
  const at::Tensor got = twice([&](const at::Tensor& in) { return checkpoint(block, in); });
  EXPECT_TRUE(at::equal(got, twice([&](const at::Tensor& in) { return block(in); })));
  const at::Tensor y = checkpoint(block, make_input()).sum();
  y.backward();
  EXPECT_THROW(y.backward(), c10::Error);  // freed, as every graph
}

TEST(ActivationCheckpoint, ParametersGetGradientsThoughNoInputRequiresThem) {
  Block block = make_block();
  const at::Tensor x = make_input(/*requires_grad=*/false);
  const Outcome plain = run(block, x, [&](const at::Tensor& in) { return block(in); });
  const Outcome got = run(block, x, [&](const at::Tensor& in) { return checkpoint(block, in); });
  EXPECT_TRUE(got.output.requires_grad());
  expect_same_bits(got, plain);
  EXPECT_FALSE(x.grad().defined());
}

TEST(ActivationCheckpoint, NothingRequiresGrad) {
  Block block = make_block();
  for (const at::Tensor& parameter : block->parameters()) parameter.requires_grad_(false);
  block->calls = 0;
  const at::Tensor y = checkpoint(block, make_input(/*requires_grad=*/false));
  EXPECT_FALSE(y.requires_grad());
  EXPECT_EQ(block->calls, 1);
}

TEST(ActivationCheckpoint, OnlyTheInputRequiresGrad) {
  Block block = make_block(0);
  for (const at::Tensor& parameter : block->parameters()) parameter.requires_grad_(false);
  const at::Tensor x = make_input(), same = make_input();
  checkpoint(block, x).sum().backward();
  block(same).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), same.grad()));
}

TEST(ActivationCheckpoint, WithoutGradModeItIsAPlainCall) {
  Block block = make_block();
  block->calls = 0;
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(block, make_input()).requires_grad());
  EXPECT_EQ(block->calls, 1);
}

TEST(ActivationCheckpoint, SeveralInputsAndResultsSomeUndefinedSomeWhole) {
  const at::Tensor x = make_input(), frozen = make_input(false), index = torch::tensor({2, 0, 1});
  const auto fn = [factor = 3.0](const at::Tensor& a, const at::Tensor& none, const at::Tensor& b,
                                 const at::Tensor& i) {
    EXPECT_FALSE(none.defined());
    EXPECT_FALSE(b.requires_grad());
    const at::Tensor mixed = a.index_select(0, i) * b * factor;
    return std::vector<at::Tensor>{mixed, at::Tensor(), mixed.argmax(1), mixed.sum(1), a};
  };
  const auto results = checkpoint(fn, x, at::Tensor(), frozen, index);
  ASSERT_EQ(results.size(), 5u);
  EXPECT_FALSE(results[1].defined());
  EXPECT_FALSE(results[2].requires_grad());
  EXPECT_TRUE(at::equal(results[2], fn(x, {}, frozen, index)[2]));
  EXPECT_TRUE(results[0].requires_grad() && results[3].requires_grad() && results[4].requires_grad());
  (results[3].sum() + (results[4] * 5).sum()).backward();  // results[0] gets no gradient
  const at::Tensor want = make_input();
  const auto plain = fn(want, {}, frozen, index);
  (plain[3].sum() + (plain[4] * 5).sum()).backward();
  EXPECT_TRUE(at::equal(x.grad(), want.grad()));
}

TEST(ActivationCheckpoint, TakesNoInputsAtAll) {
  const at::Tensor w = make_input();
  const at::Tensor y = checkpoint([&] { return w.square(); });
  y.sum().backward();
  EXPECT_TRUE(at::equal(w.grad(), 2 * w.detach()));
}

TEST(ActivationCheckpoint, TheFunctionLivesAsLongAsTheGraph) {
  at::Tensor y;
  const at::Tensor x = make_input();
  std::weak_ptr<BlockImpl> alive;
  {
    Block block = make_block(0);
    alive = block.ptr();
    y = checkpoint([block](const at::Tensor& in) mutable { return block(in); }, x).sum();
  }
  EXPECT_FALSE(alive.expired());
  y.backward();
  EXPECT_TRUE(x.grad().defined());
  y = at::Tensor();
  EXPECT_TRUE(alive.expired());
}

TEST(ActivationCheckpoint, RecomputesUnderTheAutocastOfTheFirstCallAndLeavesBackwardsOwn) {
  Block block = make_block(0);
  const auto under_autocast = [&](auto forward) {
    return run(block, make_input(), [&](const at::Tensor& in) {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
      const at::Tensor warm = torch::linear(in, block->first->weight.detach());  // the region's cache is in use
      const at::Tensor y = forward(in) + 0 * torch::linear(in, block->first->weight).sum();
      if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
      at::autocast::set_autocast_enabled(at::kCPU, false);
      return y;
    });
  };
  std::vector<at::ScalarType> seen;
  const Outcome got = under_autocast([&](const at::Tensor& in) {
    return checkpoint(
        [&](const at::Tensor& x) {
          seen.push_back(torch::linear(x, block->first->weight).scalar_type());
          return block(x);
        },
        in);
  });
  EXPECT_EQ(seen, (std::vector<at::ScalarType>{at::kBFloat16, at::kBFloat16}));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  const Outcome plain = under_autocast([&](const at::Tensor& in) { return block(in); });
  expect_same_bits(got, plain);
  // A cast that the recomputation had left behind would hide this change of the weight.
  const at::NoGradGuard no_grad;
  block->first->weight.zero_();
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(torch::linear(make_input(false), block->first->weight).abs().sum().item<float>(), 0);
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST(ActivationCheckpoint, AnExceptionInTheRecomputationLeavesTheGeneratorsAlone) {
  const at::Tensor x = make_input();
  int calls = 0;
  const at::Tensor y = checkpoint(
      [&](const at::Tensor& in) {
        const at::Tensor noise = torch::rand_like(in);
        if (++calls == 2) throw std::runtime_error("second call");
        return in * noise;
      },
      x);
  torch::manual_seed(11);
  const at::Tensor want = torch::rand({4});
  torch::manual_seed(11);
  EXPECT_EQ(text_of<std::runtime_error>([&] { y.sum().backward({}, /*retain_graph=*/true); }), "second call");
  EXPECT_TRUE(at::equal(torch::rand({4}), want));
  EXPECT_TRUE(at::GradMode::is_enabled());
  y.sum().backward();  // the third call works: nothing was lost
  EXPECT_TRUE(x.grad().defined());
}

TEST(ActivationCheckpoint, WhatItCannotDoIsSaid) {
  const at::Tensor x = make_input();
  EXPECT_EQ(text_of<UseError>([&] {
              checkpoint([](const at::Tensor& in) { return in.detach().mul_(2) * in; }, x * 1);
            }).find("[engine.checkpoint] the function changed one of its inputs in place"),
            0u);
  const at::Tensor y = checkpoint([](const at::Tensor& in) { return in * in; }, x).sum();
  EXPECT_NE(text_of<UseError>([&] { torch::autograd::grad({y}, {x}, {}, true); }).find("plain backward()"),
            std::string::npos);
  EXPECT_NE(text_of<UseError>([&] { y.backward({}, true, /*create_graph=*/true); }).find("no second derivatives"),
            std::string::npos);
  int calls = 0;
  const at::Tensor unstable = checkpoint([&](const at::Tensor& in) { return in.narrow(0, 0, ++calls) * 1; }, x);
  EXPECT_EQ(
      text_of<UseError>([&] { unstable.sum().backward(); }),
      "[engine.checkpoint] the function gave something else when called again in backward (result 0: [2, 8] where "
      "it was [1, 8]; it must compute the same each time)");
  const at::Tensor changed = make_input() * 1;
  const at::Tensor z = checkpoint([](const at::Tensor& in) { return in * in; }, changed).sum();
  changed.mul_(2);  // the input that backward needs, as without checkpointing
  EXPECT_NE(text_of<c10::Error>([&] { z.backward(); }).find("modified by an inplace operation"), std::string::npos);
}

}  // namespace
}  // namespace ballast

// Autograd's own loss.backward() in place of engine.backward(loss): the same windows, to the bit.
#include <torch/csrc/autograd/custom_function.h>

#include "ballast/base/error.h"
#include "ballast/engine/activation_checkpoint.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

enum class Form { kEngine, kPlain, kMixed };

// Parameters after three windows of varying length, each rank with gradients of its own.
std::map<std::string, at::Tensor> train(Trial& trial, Form form) {
  Session& session = trial.start(lin({{"a.p", {5, 3}, 1}, {"b.p", {7}, 2}, {"unused.p", {3}, 4}}), 2);
  int count = 0;
  const auto backward = [&](double gradient) {
    const auto branch = [&](const std::string& name) {
      return weighed_sum(session.model().parameter(name), trial.shared(gradient));
    };
    at::Tensor loss = branch("a.p");
    if (count % 2 == 0) loss = loss + branch("b.p").square() * .001;
    if (form == Form::kEngine || (form == Form::kMixed && count % 2 == 0)) {
      session.engine().backward(loss);
    } else {
      session.engine().scale_gradients_of({loss}).front().backward();
    }
    ++count;
  };
  for (const int length : {2, 3, 1}) {
    if (trial.cell().managed) {
      for (int i = 0; i < 2; ++i) {
        backward(length + i);
        EXPECT_EQ(session.step().applied, i == 1);
      }
    } else {
      for (int i = 0; i < length; ++i) backward(length + i);
      const StepReport report = session.step();
      EXPECT_TRUE(report.applied);
      EXPECT_EQ(report.micro_batches, length);
    }
  }
  EXPECT_EQ(session.engine().counters().micro_steps, 6);
  auto masters = session.masters();
  session.engine().shutdown();
  trial.forget_sessions();
  return masters;
}

TEST(PlainBackward, GivesTheSameBitsAsTheEnginesInEveryCell) {
  for (const Cell& cell : cells(kEveryStage, kEveryDType, kBothWindows))
    run_trial(2, cell, [](Trial& trial) {
      const auto wanted = train(trial, Form::kEngine);
      for (const Form form : {Form::kPlain, Form::kMixed})
        for (const auto& [name, value] : train(trial, form)) EXPECT_TRUE(bit_equal(value, wanted.at(name))) << name;
    });
}

TEST(PlainBackward, EndsWithTheOutermostOfReentrantOnes) {
  for (const Cell& cell : cells(kEveryStage, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin({{"a.p", {4}, 1}, {"b.p", {3}, 1}}));
      // All parameters inside, so that every gradient arrives in a backward inside the backward.
      const auto inside = [&](const std::string& name, const at::Tensor& x) {
        return checkpoint(
            [&, name](const at::Tensor& y) { return weighed_sum(session.model().parameter(name), 1) * y; }, x);
      };
      for (int i = 0; i < 2; ++i) {
        const at::Tensor x = at::full({}, trial.shared(2), at::TensorOptions(trial.world().device())).requires_grad_();
        (inside("a.p", x) + inside("b.p", x)).backward();
      }
      session.expect_grad("a.p", 4);
      session.expect_grad("b.p", 4);
      const StepReport report = session.step();
      EXPECT_EQ(report.micro_batches, 2);
      session.expect_value("a.p", 1 - .1 * 4 / 5);
    });
}

// Its backward throws when it is told to.
struct Breaker : torch::autograd::Function<Breaker> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw std::runtime_error("broken on purpose");
  }
};

TEST(PlainBackward, ThatFailsHalfwayIsRefusedUntilZeroGrad) {
  for (const Cell& cell : cells({0, 2, 3}, kFp32, kCallerOwned))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin({{"a.p", {4}, 1}, {"b.p", {3}, 1}}));
      at::Tensor& a = session.model().parameter("a.p");
      at::Tensor& b = session.model().parameter("b.p");
      const at::Tensor late = Breaker::apply(weighed_sum(a, 1));  // autograd runs the newest node first
      EXPECT_THROW((late + weighed_sum(b, 1)).backward(), std::runtime_error);
      EXPECT_THROW(session.engine().step(), UseError);
      EXPECT_THROW(weighed_sum(b, 1).backward(), UseError);
      session.engine().zero_grad();
      weighed_sum(a, trial.shared(1)).backward();
      session.expect_grad("a.p", 1);
      EXPECT_FALSE(session.engine().full_grad("b.p").defined());
      EXPECT_TRUE(session.step().applied);
      session.expect_value("a.p", .95);
    });
}

TEST(PlainBackward, WithoutTheLossScaleIsRefused) {
  for (const Cell& cell : cells(kEveryStage, kFp16, kBothWindows))
    run_trial(2, cell, [](Trial& trial) {
      Session& session = trial.start(lin(4, 1));
      EXPECT_THROW(session.loss(pull(1)).backward(), UseError);
      EXPECT_FALSE(session.engine().full_grad("p").defined());
      session.window({pull(trial.shared(1))});
      session.expect_value("p", .95);
    });
}

}  // namespace
}  // namespace ballast::testing

// Modules that aren't one tensor a parameter and one engine a module: tensors that share memory, two engines.

#include "ballast/base/error.h"
#include "tests/engine/support/cases.h"

namespace ballast::testing {
namespace {

void in_every_cell(const std::function<void(Trial&)>& body, const std::vector<DType>& dtypes = kFp32) {
  for (const Cell& cell : cells(kEveryStage, dtypes, kCallerOwned)) run_trial(2, cell, body);
}

void expect_refusal(const std::vector<std::string>& words, const std::function<void()>& call) {
  try {
    call();
    ADD_FAILURE() << "went on where it should name " << words.front();
  } catch (const UseError& e) {
    for (const std::string& word : words) EXPECT_NE(std::string(e.what()).find(word), std::string::npos) << e.what();
  }
}

// Two tensors, one memory: as one parameter that two modules hold.
TEST(SharedMemory, TheSameViewTwiceIsOneTiedParameter) {
  in_every_cell(
      [](Trial& trial) {
        auto model = lin({{"a.p", {3, 2}, 1}, {"b.p", {3, 2}, 5}, {"c.p", {2}}});
        model->parameter("b.p").set_data(model->parameter("a.p").data());
        Session& session = trial.start(model);
        session.expect_value("b.p", 1, 0);
        session.backward({{"a.p", trial.shared(1)}, {"b.p", trial.shared(2)}});
        session.expect_grad("a.p", 3);
        session.expect_grad("b.p", 3);
        EXPECT_TRUE(session.step().applied);
        session.expect_value("a.p", .925);
        session.expect_state("b.p", "step", 1, 0);
        session.backward({{"b.p", 2. * trial.rank()}});
        session.expect_grad("a.p", 1);
        const at::Tensor old = session.model().parameter("b.p").square().sum();
        EXPECT_TRUE(session.step().applied);
        EXPECT_THROW(session.engine().backward(old), c10::Error) << "a graph from before the step";
        const at::Tensor a = session.model().parameter("a.p").detach().clone();
        EXPECT_TRUE(bit_equal(a, session.model().parameter("b.p").detach().clone()));
        EXPECT_LT(a.max().item<double>(), .925);
        {
          const torch::NoGradGuard no_grad;
          const auto guard = session.engine().gathered({session.model().parameter("b.p")}, 1);
          session.model().parameter("b.p").fill_(4 + trial.rank());
        }
        session.expect_value("a.p", 5, 0);
        expect_all(session.model().parameter("a.p").detach().clone(), 5, 0, "the module's a.p");
        session.engine().set_full_parameter("a.p", at::full({3, 2}, 6., at::kFloat));
        expect_all(session.model().parameter("b.p").detach().clone(), 6, 0, "the module's b.p");
      },
      kEveryDType);
}

TEST(SharedMemory, OtherwiseItIsRefusedWithBothNames) {
  in_every_cell([](Trial& trial) {
    const at::Tensor base = at::arange(12, at::kFloat);
    const auto refused = [&](const at::Tensor& a, const at::Tensor& b, bool b_trainable = true) {
      auto model = lin({{"a.p", a.sizes().vec()}, {"b.p", b.sizes().vec(), 0, b_trainable}});
      model->parameter("a.p").set_data(a);
      model->parameter("b.p").set_data(b);
      expect_refusal({"a.p and b.p"}, [&] { Engine(model, Config::from_json(settings(trial.cell())), trial.world()); });
    };
    refused(base.narrow(0, 0, 8), base.narrow(0, 4, 8));
    refused(base.narrow(0, 0, 6).view({2, 3}), base.narrow(0, 0, 6).view({2, 3}).t());
    refused(base.view({3, 4}), base.view({3, 4}).select(1, 2));
    refused(base.view({3, 4}), base.view({4, 3}));
    refused(base, base, false);
    trial.start(lin(1));
  });
}

TEST(SharedMemory, ViewsThatLieSideBySideAreTwoParameters) {
  in_every_cell([](Trial& trial) {
    const at::Tensor base = at::arange(6, at::kFloat).view({3, 2});
    auto model = lin({{"a", {3}}, {"b", {3}}, {"c", {4}}, {"d", {2}}, {"e", {0}}, {"f", {0}}});
    model->parameter("a").set_data(base.select(1, 0));
    model->parameter("b").set_data(base.select(1, 1));
    const at::Tensor other = at::full({6}, 7., at::kFloat);
    model->parameter("c").set_data(other.narrow(0, 0, 4));
    model->parameter("d").set_data(other.narrow(0, 4, 2));
    model->parameter("e").set_data(other.narrow(0, 1, 0));
    model->parameter("f").set_data(other.narrow(0, 1, 0));
    Session& session = trial.start(model);
    session.window({{{"a", trial.shared(1)}, {"c", trial.shared(1)}}});
    EXPECT_TRUE(at::allclose(session.engine().full_parameter("a").cpu(), at::arange(0, 6, 2) - .05, 0, 1e-6));
    EXPECT_TRUE(at::equal(session.engine().full_parameter("b").cpu(), at::arange(1, 6, 2).to(at::kFloat)));
    session.expect_value("c", 6.95);
    session.expect_value("d", 7, 0);
  });
}

TEST(TwoEngines, OnOneModuleAreRefusedWhileTheFirstLives) {
  in_every_cell([](Trial& trial) {
    auto model = lin({{"a.p", {4}, 1}, {"b.p", {3}, 1}});
    Session& session = trial.start(model);
    session.backward({{"a.p", trial.shared(1)}});
    const auto part = model->named_children()["a"];
    for (const auto& module : {std::static_pointer_cast<torch::nn::Module>(model), part})
      expect_refusal({"p;", "shutdown()"},
                     [&] { Engine(module, Config::from_json(settings(trial.cell())), trial.world()); });
    EXPECT_TRUE(session.step().applied);  // the first has noticed nothing
    session.expect_value("a.p", .95);
    session.engine().shutdown();
    trial.forget_sessions();
    Session& second = trial.start(model);
    second.expect_value("a.p", .95);
    second.window({{{"a.p", trial.shared(1)}}});
    second.expect_value("a.p", .90);
  });
}

// A generator's loss goes through the critic, which another engine trains: the critic's window gets its gradient, as
// param.grad would, and the critic's zero_grad() drops it.
TEST(TwoEngines, WhoseGraphsMeetTakeTheirOwnGradients) {
  in_every_cell([](Trial& trial) {
    Session& generator = trial.start(lin({{"p", {4}, 2}}));
    Session& critic = trial.start(lin({{"p", {4}, 3}}));
    at::Tensor& made = generator.model().parameter("p");
    at::Tensor& judge = critic.model().parameter("p");
    const auto judged = [&](const at::Tensor& what) { return (what * judge).sum() * trial.shared(1); };

    generator.engine().backward(judged(made));
    generator.expect_grad("p", 3);
    critic.expect_grad("p", 2);
    critic.engine().zero_grad();
    EXPECT_FALSE(critic.engine().full_grad("p").defined());
    EXPECT_TRUE(generator.step().applied);
    generator.expect_value("p", 1.925);

    judge.requires_grad_(false);
    generator.engine().backward(judged(made));
    judge.requires_grad_(true);
    generator.expect_grad("p", 3);
    EXPECT_FALSE(critic.engine().full_grad("p").defined());
    generator.engine().zero_grad();

    critic.engine().backward(judged(made.detach()));
    critic.expect_grad("p", 1.925);
    EXPECT_TRUE(critic.step().applied);
    EXPECT_FALSE(generator.engine().full_grad("p").defined());
  });
}

// A loss scale of another engine, or none, would be taken for this one's.
TEST(TwoEngines, WithLossScalesWhoseGraphsMeetAreToldHowToPartThem) {
  in_every_cell(
      [](Trial& trial) {
        Session& generator = trial.start(lin({{"p", {4}, 2}}));
        Session& critic = trial.start(lin({{"p", {4}, 3}}));
        at::Tensor& made = generator.model().parameter("p");
        at::Tensor& judge = critic.model().parameter("p");
        const at::Tensor both = (made * judge).sum() * trial.shared(1);
        expect_refusal({"another engine's backward", "requires_grad_(false)", "detach()"},
                       [&] { generator.engine().backward(both); });
        generator.engine().zero_grad();
        EXPECT_FALSE(critic.engine().full_grad("p").defined());
      },
      kFp16);
}

}  // namespace
}  // namespace ballast::testing

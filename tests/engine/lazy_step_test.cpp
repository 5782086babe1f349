// step() leaves updates off the device to the rank's lane and returns. Nobody may notice but by the time that it takes:
// whoever reads a weight, in whatever way, reads the new one.

#include <ATen/ATen.h>
#include <c10/core/StorageImpl.h>

#include "ballast/base/error.h"
#include "ballast/tiers/lane_hook.h"
#include "tests/engine/support/homes.h"
#include "tests/engine/support/lane_gate.h"
#include "tests/engine/support/plain_optimizer.h"
#include "tests/engine/support/trial.h"

namespace ballast::testing {
namespace {

constexpr const char* kFirst = "a.p";
constexpr const char* kLast = "c.p";  // its update runs last
const std::vector<Named> kUnits{{kFirst, {200}}, {"b.p", {65}}, {kLast, {300}}};
constexpr int kRanks = 2;

/// Some ten milliseconds of work on the current stream of an accelerator: what is queued behind it comes late, so that
/// whoever doesn't wait for it is found out.
void keep_busy(c10::Device device) {
  if (device.is_cpu()) return;
  at::Tensor product = at::eye(4096, at::TensorOptions(at::kFloat).device(device));
  for (int i = 0; i < 5; ++i) product = product.matmul(product);
}

/// An engine whose updates wait for a test's word, and then for the lane's stream.
struct Gated {
  Gated(Trial& trial, const nlohmann::json& settings, bool driver_compares = true) {
    const LaneHook hook([gate = gate, device = trial.world().device()](std::string_view what) {
      gate->pass(what);
      if (what == "update") keep_busy(device);
    });
    if (driver_compares) {
      session = &trial.start(lin(kUnits), settings);
    } else {
      own = std::make_unique<Session>(lin(kUnits), settings, trial.world(), unused);
      session = own.get();
    }
  }

  at::Tensor& parameter(const char* name) { return session->model().parameter(name); }
  Engine& engine() { return session->engine(); }
  /// A window with the gradient 1 everywhere, its updates held back.
  StepReport step() {
    session->backward({{kFirst, 1}, {"b.p", 1}, {kLast, 1}});
    gate->close();
    return session->engine().step();
  }

  std::shared_ptr<LaneGate> gate = std::make_shared<LaneGate>();
  Board unused{kRanks};
  std::unique_ptr<Session> own;
  Session* session = nullptr;
};

nlohmann::json settings_of(const Cell& cell, const Home& home, bool clip = false) {
  nlohmann::json changes = home.changes();
  changes["gradient_clipping"] = clip ? 1.0 : 0.0;
  return settings(cell, 1, changes);
}

/// In every stage, wherever states lie off the device.
void in_every_home(const std::function<void(Trial&, const Home&)>& body, DType dtype = DType::kFloat32,
                   const std::vector<int>& stages = {0, 1, 2, 3}) {
  for (const Home& home : homes()) {
    if (home.placement == Placement::kDevice) continue;
    SCOPED_TRACE(home.name);
    for (const int stage : stages)
      run_trial(kRanks, {stage, home.placement, dtype, false}, [&](Trial& trial) { body(trial, home); });
  }
}

/// A way to read a parameter whose elements are equal: the value of one.
struct Reader {
  const char* name;
  std::function<double(Gated&, const char* parameter)> read;
};

double mean_of(const at::Tensor& tensor) { return tensor.detach().to(at::kDouble).mean().item<double>(); }

const std::vector<Reader> kReaders{
    {"forward",
     [](Gated& gated, const char* name) {
       const at::Tensor& p = gated.parameter(name);
       return (p * 2).to(at::kDouble).mean().item<double>() / 2;
     }},
    {"evaluation",
     [](Gated& gated, const char* name) {
       const at::NoGradGuard no_grad;
       return gated.parameter(name).max().item<double>();
     }},
    {"view",
     [](Gated& gated, const char* name) {
       return gated.parameter(name).detach().view({-1, 5}).t().select(0, 4).select(0, 2).item<double>();
     }},
    {"data()", [](Gated& gated, const char* name) { return mean_of(gated.parameter(name).data().clone()); }},
    {"clone", [](Gated& gated, const char* name) { return mean_of(gated.parameter(name).clone()); }},
    {"copy_",
     [](Gated& gated, const char* name) {
       const at::NoGradGuard no_grad;
       const at::Tensor& p = gated.parameter(name);
       return mean_of(at::empty_like(p, p.options().requires_grad(false)).copy_(p));
     }},
    {"list of tensors", [](Gated& gated, const char* name) { return mean_of(at::cat({gated.parameter(name)})); }},
    {"full_parameter", [](Gated& gated, const char* name) { return mean_of(gated.engine().full_parameter(name)); }},
    {"gathered",
     [](Gated& gated, const char* name) {
       const auto guard = gated.engine().gathered({gated.parameter(name)});
       const at::Tensor& p = gated.parameter(name);
       if (p.is_cpu() && p.scalar_type() == at::kFloat)
         return static_cast<double>(static_cast<const float*>(p.const_data_ptr())[p.numel() - 1]);
       return mean_of(p);
     }},
    {"synchronize",
     [](Gated& gated, const char* name) {
       gated.engine().synchronize();
       return mean_of(gated.parameter(name));
     }},
};

void reads_are_new(Trial& trial, const Home& home, bool clip) {
  Gated gated(trial, settings_of(trial.cell(), home, clip));
  ScalarAdam adam;
  const double tolerance = trial.cell().dtype == DType::kFloat32 ? 1e-5 : 1e-2;  // a stale value is off by more
  for (const Reader& reader : kReaders)
    for (const char* name : {kLast, kFirst}) {
      const int before = gated.gate->passed();
      const StepReport report = gated.step();
      EXPECT_TRUE(report.applied);
      EXPECT_EQ(report.clip_factor < 1, clip);
      EXPECT_EQ(gated.gate->passed(), before) << "step() has waited for updates";
      const double value = adam.step(report.clip_factor);
      gated.gate->open_soon();
      EXPECT_NEAR(reader.read(gated, name), value, tolerance) << name << " by " << reader.name;
      for (const Named& named : kUnits)
        EXPECT_NEAR(mean_of(gated.parameter(named.name.c_str())), value, tolerance) << named.name;
    }
}

TEST(LazyStep, NoStaleWeightIsRead) {
  in_every_home([](Trial& trial, const Home& home) { reads_are_new(trial, home, false); });
}
TEST(LazyStep, NoStaleWeightIsReadInHalfPrecision) {
  in_every_home([](Trial& trial, const Home& home) { reads_are_new(trial, home, false); }, DType::kBFloat16);
}
TEST(LazyStep, NoStaleWeightIsReadAfterClipping) {
  in_every_home([](Trial& trial, const Home& home) { reads_are_new(trial, home, true); });
}

// Who needs one unit waits for that one alone.
TEST(LazyStep, AUnitIsReadyBeforeThoseBehindIt) {
  in_every_home([](Trial& trial, const Home& home) {
    nlohmann::json json = settings_of(trial.cell(), home);
    json["zero_optimization"]["stage3_prefetch_bucket_size"] = 0;
    Gated gated(trial, json);
    gated.step();
    gated.gate->let(1);
    EXPECT_NEAR(mean_of(gated.parameter(kFirst)), -.05, 1e-6);
    // The next window, while the last one's updates wait. On a GPU its collectives are launched behind the gathers of
    // these, in stages that have both.
    const bool behind = trial.world().device().is_cuda() && (trial.cell().stage == 1 || trial.cell().stage == 2);
    if (behind) gated.gate->open_soon();
    gated.session->backward({{kFirst, 1}});
    if (!behind) {
      EXPECT_EQ(gated.gate->passed(), 1);
      gated.gate->open_soon();
    }
    EXPECT_TRUE(gated.session->step().applied);
    EXPECT_NEAR(mean_of(gated.parameter(kLast)), -.05, 1e-6);
    EXPECT_NEAR(mean_of(gated.parameter(kFirst)), -.10, 1e-6);
    gated.session->expect_state(kLast, "exp_avg", .1);
    gated.session->expect_state(kFirst, "exp_avg", .19);
  });
}

TEST(LazyStep, AWriteComesAfterTheUpdateThatWasDecidedBefore) {
  in_every_home([](Trial& trial, const Home& home) {
    Gated gated(trial, settings_of(trial.cell(), home));
    gated.step();
    gated.gate->open_soon();
    gated.engine().set_full_parameter(kLast, at::full({300}, 7, at::kFloat));
    expect_all(gated.parameter(kLast), 7, 0, kLast);
    gated.session->expect_value(kLast, 7, 0);
    gated.session->expect_state(kLast, "exp_avg", .1);

    gated.step();
    gated.gate->open_soon();
    {
      const auto guard = gated.engine().gathered({gated.parameter(kFirst)}, 1);
      const at::NoGradGuard no_grad;
      if (trial.rank() == 1) gated.parameter(kFirst).fill_(3);
    }
    expect_all(gated.parameter(kFirst), 3, 0, kFirst);
    gated.session->expect_value(kFirst, 3, 0);
    gated.session->expect_value("b.p", -.1);
  });
}

TEST(LazyStep, ALoadComesAfterTheUpdateThatWasDecidedBefore) {
  in_every_home([](Trial& trial, const Home& home) {
    Gated gated(trial, settings_of(trial.cell(), home));
    gated.engine().save_checkpoint(trial.folder(), "start");
    gated.step();
    gated.gate->open_soon();
    gated.engine().load_checkpoint(trial.folder(), "start");
    for (const Named& named : kUnits) {
      const char* const name = named.name.c_str();
      expect_all(gated.parameter(name), 0, 0, name);
      gated.session->expect_value(name, 0, 0);
      gated.session->expect_state(name, "exp_avg", 0, 0);
    }
  });
}

// What an operator was given before the write is what it computes with, however late the device comes to it.
TEST(LazyStep, AWriteComesAfterTheOperatorsBeforeIt) {
  for (const Placement placement : kEveryPlacement)
    for (const int stage : {0, 1, 2, 3}) {
      run_trial(kRanks, {stage, placement, DType::kFloat32, false}, [](Trial& trial) {
        Session& session = trial.start(lin(kUnits));
        const at::Tensor& parameter = session.model().parameter(kLast);
        session.micro_batch({{kLast, 1}});
        for (const double value : {7, 8}) {
          const double before = session.engine().full_parameter(kLast)[0].item<double>();
          keep_busy(trial.world().device());
          const at::Tensor seen = parameter.detach() * 1;
          session.engine().set_full_parameter(kLast, at::full({300}, value, at::kFloat));
          expect_all(seen, before, 0, "what was computed before the write");
          expect_all(parameter, value, 0, kLast);
        }
      });
    }
}

TEST(LazyStep, TheEndOfTheEngineWaits) {
  in_every_home([](Trial& trial, const Home& home) {
    {
      Gated gated(trial, settings_of(trial.cell(), home), false);
      gated.step();
      gated.gate->open_soon();
      gated.engine().shutdown();
      for (const Named& named : kUnits) expect_all(gated.parameter(named.name.c_str()), -.05, 1e-6, named.name);
    }
    trial.start(lin(1));
  });
}

// Nor does an end without peers leave whole parameters half written: what was decided before is done.
TEST(LazyStep, AnAbandonedEngineLeavesTheNewWeights) {
  in_every_home(
      [](Trial& trial, const Home& home) {
        {
          Gated gated(trial, settings_of(trial.cell(), home), false);
          gated.step();
          gated.gate->open_soon();
          gated.engine().abandon();
          for (const Named& named : kUnits) expect_all(gated.parameter(named.name.c_str()), -.05, 1e-6, named.name);
        }
        trial.start(lin(1));
      },
      DType::kFloat32, {0, 1, 2});
}

template <class Storage>
constexpr bool kCanDisarm = requires(Storage& s) {
  s.clear_data_ptr_access_error_msg_();
};

TEST(LazyStep, APointerThatIsTakenTooEarlyIsAnError) {
  if (!kCanDisarm<c10::StorageImpl>) GTEST_SKIP() << "this LibTorch can't take such an error back";
  in_every_home([](Trial& trial, const Home& home) {
    Gated gated(trial, settings_of(trial.cell(), home));
    gated.step();
    const at::Tensor& p = gated.parameter(kLast);
    const auto expect_refusal = [&](const char* remedy) {
      try {
        (void)p.const_data_ptr();
        ADD_FAILURE() << "a pointer to a weight that isn't there";
      } catch (const c10::Error& e) {
        EXPECT_NE(std::string(e.what()).find(remedy), std::string::npos) << e.what();
      }
    };
    const bool sharded = trial.cell().stage == 3;
    expect_refusal(sharded ? "gathered(" : "synchronize()");
    gated.gate->open_soon();
    gated.engine().synchronize();
    if (sharded) expect_refusal("gathered(");
    const auto guard = gated.engine().gathered(sharded ? std::vector<at::Tensor>{p} : std::vector<at::Tensor>{});
    if (p.is_cpu()) {
      EXPECT_NEAR(static_cast<const float*>(p.const_data_ptr())[299], -.05, 1e-6);
    }
  });
}

// An update that step() promised can't be taken back: from its failure on there is no right answer but its cause.
TEST(LazyStep, AFailedUpdateEndsTheEngine) {
  in_every_home([](Trial& trial, const Home& home) {
    const auto expect_cause = [](const char* call, const std::function<void()>& calls) {
      try {
        calls();
        ADD_FAILURE() << call << " went on after a failed update";
      } catch (const std::exception& e) {
        EXPECT_NE(std::string(e.what()).find("a head crash"), std::string::npos) << call << ": " << e.what();
      }
    };
    for (const bool operator_first : {true, false}) {
      Gated gated(trial, settings_of(trial.cell(), home), false);
      gated.session->window({{{kFirst, 1}, {"b.p", 1}, {kLast, 1}}});
      gated.session->expect_value(kLast, -.05);
      gated.step();
      gated.gate->fail_next("a head crash");
      gated.gate->open_soon();
      if (operator_first) expect_cause("forward", [&] { (void)gated.session->loss({{kLast, 1}, {kFirst, 1}}); });
      for (int twice = 0; twice < 2; ++twice) {
        expect_cause("synchronize", [&] { gated.engine().synchronize(); });
        expect_cause("step", [&] { gated.engine().step(); });
        expect_cause("backward", [&] { gated.engine().backward(at::ones({}, at::kFloat).requires_grad_()); });
        expect_cause("zero_grad", [&] { gated.engine().zero_grad(); });
        expect_cause("gathered", [&] { gated.engine().gathered().end(); });
        expect_cause("full_parameter", [&] { (void)gated.engine().full_parameter(kFirst); });
        expect_cause("operator", [&] { (void)mean_of(gated.parameter(kLast)); });
      }
    }
    trial.start(lin(1));  // the world survives the engine
  });
}

}  // namespace
}  // namespace ballast::testing

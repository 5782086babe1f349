#include "cli/evaluation.h"

#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "ballast/base/math.h"

namespace ballast::cli {

Evaluation evaluate(models::GptImpl& model, const data::Windows& windows, std::int64_t limit, std::int64_t batch,
                    const World& world, Agreement& agreement) {
  const std::int64_t available = windows.count(data::Part::kHeldOut);
  const std::int64_t count = std::min(limit, available);
  torch::NoGradGuard no_grad;
  model.eval();
  double nats = 0, tokens = 0;
  for (std::int64_t round = 0; round < ceil_div(count, world.size() * batch); ++round) {
    const std::int64_t first = (round * world.size() + world.rank()) * batch;
    std::vector<std::int64_t> indices;
    for (std::int64_t i = first; i < std::min(first + batch, count); ++i) indices.push_back(i * available / count);
    const bool nothing_left = indices.empty();  // for this rank: it runs along for the gathers
    if (nothing_left) indices.push_back(0);
    const data::Batch held_out = windows.read(data::Part::kHeldOut, indices);
    const at::Tensor loss = model.loss(held_out.inputs.to(world.device()), held_out.targets.to(world.device()));
    if (nothing_left) continue;
    nats += loss.item<double>() * static_cast<double>(held_out.tokens());
    tokens += static_cast<double>(held_out.tokens());
  }
  model.train();

  double all_nats = 0, all_tokens = 0;
  for (const auto& of_rank : agreement.exchange({nats, tokens})) {
    all_nats += of_rank[0];
    all_tokens += of_rank[1];
  }
  return {all_tokens > 0 ? all_nats / all_tokens : 0, static_cast<std::int64_t>(all_tokens)};
}

}  // namespace ballast::cli

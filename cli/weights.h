#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ballast/models/gpt.h"

namespace ballast::cli {

/// A model's weights in files, whoever wrote them. Memory: what read() returns, and as much again while it does.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  /// The folder, for people.
  virtual std::string where() const = 0;
  /// Nothing where the files don't say. Throws ConfigError where they describe no model that can be built.
  virtual std::optional<models::GptOptions> model() const = 0;
  /// Throws UseError with all names unless the files hold exactly such a model's weights.
  virtual void check(const models::GptOptions& options) = 0;
  /// fp32 on the CPU, of the parameter's shape. check() has passed. IoError.
  virtual at::Tensor read(const models::ParameterShape& parameter) = 0;
};

/// A checkpoint (a folder of them stands for its latest), or a folder as Hugging Face's libraries write it. IoError
/// where it is neither.
std::unique_ptr<WeightSource> open_weights(const std::filesystem::path& path);
/// A checkpoint only, as export takes it.
std::unique_ptr<WeightSource> open_checkpoint_weights(const std::filesystem::path& path);

/// Puts all of them into the model, after check().
void load(WeightSource& weights, models::GptImpl& model);

/// UseError where so many layers can't be in so many tensors. A stranger's number of layers is checked before anything
/// is made of that size.
void refuse_too_many_layers(std::int64_t layers, std::size_t tensors, const std::string& where);

/// What is wrong with a set of names and shapes.
class Misfit {
 public:
  using Shapes = std::map<std::string, std::vector<std::int64_t>>;
  Misfit(const Shapes& found, const Shapes& wanted);
  /// UseError with the first names of each kind and how many more there are, where there are any.
  void refuse(const std::string& where) const;

 private:
  std::vector<std::string> missing_, unexpected_, misshaped_;
};

}  // namespace ballast::cli

#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "ballast/checkpoint/safetensors.h"
#include "cli/weights.h"

namespace ballast::cli {

/// A folder that Hugging Face's libraries have written, or will read: config.json, and model.safetensors or several
/// files with model.safetensors.index.json. Opening it reads the files' headers. IoError, ConfigError.
class HuggingFaceFolder final : public WeightSource {
 public:
  static constexpr const char* kConfig = "config.json";
  static constexpr const char* kWeights = "model.safetensors";
  static constexpr const char* kIndex = "model.safetensors.index.json";

  explicit HuggingFaceFolder(std::filesystem::path path);

  std::string where() const override { return path_.string(); }
  std::optional<models::GptOptions> model() const override;
  void check(const models::GptOptions& options) override;
  at::Tensor read(const models::ParameterShape& parameter) override;

 private:
  struct Stored {
    std::string file;
    ckpt::TensorInfo tensor;
  };
  void add_file(const std::string& name);
  at::Tensor read(const Stored& stored);

  const std::filesystem::path path_;
  nlohmann::json config_;
  std::map<std::string, Stored> stored_;                     // by the name in the file
  std::map<std::string, std::vector<Stored>> by_parameter_;  // by our name, rows in order; filled in by check()
  std::map<std::string, bool> transposed_;                   // likewise
  std::string open_name_;
  std::unique_ptr<ckpt::SafetensorsReader> open_;
};

struct ExportOptions {
  c10::ScalarType dtype = c10::kFloat;                    // or kBFloat16
  std::int64_t most_shard_bytes = std::int64_t{5} << 30;  // a greater tensor has a file of its own
};

/// Writes such a folder, which must not exist: it appears whole. Tensor by tensor. IoError, UseError, ConfigError.
/// Returns the bytes of its tensors.
std::int64_t write_hugging_face(WeightSource& weights, const models::GptOptions& options,
                                const std::filesystem::path& to, const ExportOptions& how);

}  // namespace ballast::cli

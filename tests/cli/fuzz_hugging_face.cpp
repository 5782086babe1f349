// Strange folders of Hugging Face's libraries against what reads them. An input is which of their files it is (its
// first byte: config.json, the index, else the weights) and the text; the others are those of a small GPT-2.
#include <fstream>
#include <iterator>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/checkpoint/safetensors.h"
#include "ballast/models/hugging_face.h"
#include "cli/hugging_face.h"
#include "tests/checkpoint/fuzz_driver.h"

namespace ballast::fuzz {
namespace {

using cli::HuggingFaceFolder;
namespace fs = std::filesystem;

constexpr const char* kConfig = R"({"model_type": "gpt2", "vocab_size": 5, "n_positions": 3, "n_layer": 1, "n_embd": 4,
  "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0})";
constexpr const char* kListed = "a.safetensors";  // in the corpus's indices

std::string weights() {
  const models::GptOptions options = models::options_of_foreign(nlohmann::json::parse(kConfig), kConfig);
  std::vector<ckpt::TensorSpec> specs;
  std::size_t elements = 0;
  for (const models::ForeignTensor& tensor : models::foreign_tensors(options)) {
    specs.push_back({tensor.name, c10::kFloat, tensor.shape});
    elements += static_cast<std::size_t>(c10::multiply_integers(tensor.shape));
  }
  const fs::path path = scratch() / "weights";
  ckpt::SafetensorsWriter writer(path, specs, {}, {});
  const std::vector<float> zeros(elements);
  writer.append(std::as_bytes(std::span(zeros)));
  writer.finish();
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void read(const fs::path& path) {
  HuggingFaceFolder folder(path);
  const models::GptOptions options = folder.model().value();
  folder.check(options);
  for (const models::ParameterShape& parameter : models::parameter_shapes(options))
    static_cast<cli::WeightSource&>(folder).read(parameter);
}

}  // namespace

bool take(const std::string& input) {
  if (input.empty()) return false;
  static const std::string good_weights = weights();
  const bool config = input[0] == 'c', index = input[0] == 'i';
  const fs::path folder = scratch() / (index ? "indexed" : "whole");
  fs::create_directories(folder);
  const std::string text = input.substr(1);
  write(folder / HuggingFaceFolder::kConfig, config ? text : kConfig);
  write(folder / (index ? kListed : HuggingFaceFolder::kWeights), config || index ? good_weights : text);
  if (index) write(folder / HuggingFaceFolder::kIndex, text);
  try {
    read(folder);
    return true;
  } catch (const Error& e) {
    return refused_by_name(e.what(), folder.string());
  }
}

}  // namespace ballast::fuzz

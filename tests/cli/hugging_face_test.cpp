// Folders of Hugging Face's without its libraries: what is written comes back, and strange ones are refused by name.
// hugging_face_test.py holds the same files to the transformers package.
#include "cli/hugging_face.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <functional>
#include <sstream>

#include "ballast/base/error.h"
#include "ballast/checkpoint/manifest.h"
#include "cli/commands.h"
#include "tests/data/temporary_folder.h"
#include "tests/models/small.h"

namespace ballast::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

/// A model in memory.
class ModelWeights final : public WeightSource {
 public:
  explicit ModelWeights(const models::GptOptions& options) : model_(options) {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model_->parameters()) parameter.normal_();  // norms and biases too
  }
  std::string where() const override { return "memory"; }
  std::optional<models::GptOptions> model() const override { return model_->options; }
  void check(const models::GptOptions&) override {}
  at::Tensor read(const models::ParameterShape& parameter) override {
    return model_->named_parameters()[parameter.name].detach();
  }

 private:
  models::Gpt model_;
};

std::vector<models::GptOptions> families() {
  models::GptOptions untied = models::small(), tied = models::small_llama();
  untied.tied_head = false;
  tied.tied_head = tied.bias = true;
  return {models::small(), untied, models::small_llama(), tied};
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

class HuggingFace : public testing::Test {
 protected:
  fs::path at(const std::string& name) const { return folder_.path() / name; }

  void expect_equal(WeightSource& got, WeightSource& want, c10::ScalarType rounded = at::kFloat) {
    const models::GptOptions options = got.model().value();
    got.check(options);
    for (const models::ParameterShape& shape : models::parameter_shapes(want.model().value()))
      EXPECT_TRUE(got.read(shape).equal(want.read(shape).to(rounded).to(at::kFloat)))
          << shape.name << " of " << got.where();
  }

  void write(const std::string& file, const std::vector<ckpt::TensorSpec>& tensors) {
    ckpt::SafetensorsWriter writer(at(file), tensors, {}, {});
    for (const ckpt::TensorSpec& tensor : tensors) {
      const at::Tensor zeros = at::zeros(tensor.shape, tensor.dtype);
      writer.append({static_cast<const std::byte*>(zeros.const_data_ptr()), zeros.nbytes()});
    }
    writer.finish();
  }

  data::TemporaryFolder folder_;
};

TEST_F(HuggingFace, WhatIsWrittenComesBack) {
  int number = 0;
  for (const models::GptOptions& options : families()) {
    ModelWeights memory(options);
    const std::string name = std::to_string(number++);
    for (const auto dtype : {at::kFloat, at::kBFloat16})
      for (const std::int64_t most : {std::int64_t{1} << 30, std::int64_t{1000}, std::int64_t{1}}) {
        const fs::path to = at(name + "-" + c10::toString(dtype) + std::to_string(most));
        write_hugging_face(memory, options, to, {dtype, most});
        EXPECT_EQ(fs::exists(to / HuggingFaceFolder::kWeights), most > 1000) << to;
        expect_equal(*open_weights(to), memory, dtype);
      }
  }
}

TEST_F(HuggingFace, CheckpointsAndFoldersAreTheSameWeights) {
  int number = 0;
  for (const models::GptOptions& options : families()) {
    ModelWeights memory(options);
    const std::string name = std::to_string(number++);
    write_hugging_face(memory, options, at(name), {});
    import_checkpoint(at(name), at("saved" + name));
    expect_equal(*open_weights(at("saved" + name)), memory);
    expect_equal(*open_weights(at("saved" + name) / "imported"), memory);
    export_checkpoint(at("saved" + name), at("again" + name), {}, std::nullopt);
    expect_equal(*open_weights(at("again" + name)), memory);
  }
}

TEST_F(HuggingFace, AGreatTensorHasAFileOfItsOwn) {
  ModelWeights memory(models::small());
  write_hugging_face(memory, models::small(), at("out"), {at::kFloat, 600});  // the embedding has 528 bytes
  std::size_t files = 0;
  for (const auto& entry : fs::directory_iterator(at("out"))) {
    if (entry.path().extension() != ".safetensors") continue;
    ++files;
    const ckpt::SafetensorsReader file(entry.path(), {});
    std::int64_t bytes = 0;
    for (const ckpt::TensorInfo& tensor : file.header().tensors) bytes += tensor.end - tensor.begin;
    EXPECT_TRUE(bytes <= 600 || file.header().tensors.size() == 1) << entry.path();
    EXPECT_EQ(file.header().metadata.at("format"), "pt");
  }
  std::ifstream index(at("out") / HuggingFaceFolder::kIndex);
  std::int64_t bytes = 0;
  for (const auto& shape : models::parameter_shapes(models::small())) bytes += 4 * c10::multiply_integers(shape.sizes);
  const json json = json::parse(index);
  EXPECT_EQ(json["metadata"]["total_size"], bytes);
  std::set<std::string> named;
  for (const auto& [name, file] : json["weight_map"].items()) named.insert(file.get<std::string>());
  EXPECT_EQ(named.size(), files);
  EXPECT_TRUE(named.contains("model-00001-of-0000" + std::to_string(files) + ".safetensors") || files > 9);
}

TEST_F(HuggingFace, AFailedExportLeavesNothing) {
  class Failing final : public WeightSource {
   public:
    std::string where() const override { return "nowhere"; }
    std::optional<models::GptOptions> model() const override { return models::small(); }
    void check(const models::GptOptions&) override {}
    at::Tensor read(const models::ParameterShape& parameter) override {
      if (parameter.name == "final_norm.weight") throw IoError("tests.read", "no more");
      return at::zeros(parameter.sizes);
    }
  } weights;
  EXPECT_EQ(error_of([&] { write_hugging_face(weights, models::small(), at("out/"), {}); }), "[tests.read] no more");
  EXPECT_TRUE(fs::is_empty(folder_.path()));
  fs::create_directory(at("out"));
  EXPECT_NE(error_of([&] { write_hugging_face(weights, models::small(), at("out"), {}); }).find("the folder exists"),
            std::string::npos);
}

TEST_F(HuggingFace, MisfitsAreNamedTogether) {
  ModelWeights memory(models::small_llama());
  write_hugging_face(memory, models::small_llama(), at("llama"), {});
  models::GptOptions other = models::small_llama();
  other.mlp_width = 21;
  other.tied_head = true;
  EXPECT_NE(error_of([&] { HuggingFaceFolder(at("llama")).check(other); }).find("the head is not the embedding"),
            std::string::npos);
  other.tied_head = false;
  other.layers = 1;
  const std::string layer = "model.layers.1.", mlp = "model.layers.0.mlp.";
  EXPECT_EQ(error_of([&] { HuggingFaceFolder(at("llama")).check(other); }),
            "[cli.weights] the weights are of another model (" + at("llama").string() + "; the model has no " + layer +
                "input_layernorm.weight, " + layer + "mlp.down_proj.weight, " + layer + "mlp.gate_proj.weight, " +
                layer + "mlp.up_proj.weight and 5 more; of other shapes are " + mlp +
                "down_proj.weight ([24, 20], want [24, 21]), " + mlp + "gate_proj.weight ([20, 24], want [21, 24]), " +
                mlp + "up_proj.weight ([20, 24], want [21, 24]))");
}

TEST_F(HuggingFace, StrangeFoldersAreRefusedByName) {
  const auto error = [&] { return error_of([&] { HuggingFaceFolder(folder_.path()).check(models::small()); }); };
  const auto expect = [&](const std::string& part) { EXPECT_NE(error().find(part), std::string::npos) << error(); };
  folder_.write("config.json", "{");
  expect("config.json");
  folder_.write("config.json", R"({"model_type": "gpt2"})");
  expect("no weights");
  for (const char* file : {"\"../model.safetensors\"", "\"/etc/passwd\"", "\".hidden\"", "3", "\"\""}) {
    folder_.write("model.safetensors.index.json", R"({"weight_map": {"a": )" + std::string(file) + "}}");
    expect("a bad file name in the index");
  }
  folder_.write("model.safetensors.index.json", R"({"weight_map": ["a"]})");
  expect("no weight_map");
  folder_.write("model.safetensors.index.json", R"({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}})");
  expect("a.safetensors");
  write("a.safetensors", {{"x", at::kFloat, {2}}});
  write("b.safetensors", {{"x", at::kFloat, {2}}});
  expect("two files hold a tensor");
  write("b.safetensors", {{"y", at::kInt, {2}}});
  expect("a tensor's type is none of");
  write("b.safetensors", {{"y", at::kDouble, {2}}});
  expect("they lack transformer.h.0.attn.c_attn.bias");
  models::GptOptions deep = models::small();
  deep.layers = std::int64_t{1} << 31;  // as a config.json can say
  EXPECT_NE(
      error_of([&] { HuggingFaceFolder(folder_.path()).check(deep); }).find("; 2 tensors, want 2147483648 layers)"),
      std::string::npos);
  EXPECT_NE(error_of([&] { open_weights(at("nowhere")); }).find("no weights here"), std::string::npos);
}

TEST_F(HuggingFace, ACheckpointThatDoesNotSayItsModelNeedsToBeTold) {
  ModelWeights memory(models::small());
  write_hugging_face(memory, models::small(), at("hf"), {});
  import_checkpoint(at("hf"), at("saved"));
  const fs::path file = at("saved/imported/manifest.json");
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  ckpt::Manifest manifest = ckpt::Manifest::from_text(text.str(), "manifest");
  manifest.client_state = {{"epoch", 3}};
  std::ofstream(file, std::ios::trunc) << manifest.to_text();
  EXPECT_NE(error_of([&] { export_checkpoint(at("saved"), at("out"), {}, std::nullopt); }).find("--config FILE"),
            std::string::npos);
  export_checkpoint(at("saved"), at("out"), {}, models::small());
  expect_equal(*open_weights(at("out")), memory);
}

}  // namespace
}  // namespace ballast::cli

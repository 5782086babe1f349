#include "ballast/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "ballast/base/checksum.h"
#include "tests/checkpoint/support.h"

namespace ballast::ckpt {
namespace {

using Json = nlohmann::json;

Manifest full() {
  Manifest manifest = small_manifest("step7", 3);
  manifest.saved = 1.8e9 + 0.25;
  manifest.stage = 3;
  manifest.compute_dtype = "bf16";
  manifest.keys = {"exp_avg", "exp_avg_sq"};
  manifest.counters = {{"global_steps", 7}, {"micro_steps", std::int64_t{1} << 60}};
  manifest.loss_scale = 0.1;
  manifest.loss_scaler = {{"last_overflow", -1}};
  manifest.scheduler = "WarmupLR {}";
  manifest.schedule_steps = 5;
  manifest.lr = {1e-3, 1.0 / 3};
  manifest.window = WindowRecord{true, 3, 4, 1, 2.5, "weighted"};
  manifest.client_state = {
      {"epoch", 3}, {"text", "ä"}, {"checksum", "0000"}, {"nested", {{"list", {1, 2.5, nullptr}}}}};
  for (int rank = 0; rank < 3; ++rank) {
    manifest.files.push_back({rank_file_name(rank, 3), 100 + rank, 0xfedcba9876543210u + static_cast<unsigned>(rank)});
    manifest.rng.push_back({{"cpu", {rank_file_name(rank, 3), "rng/cpu", 0, 5056, 17}}});
  }
  ParameterRecord frozen;
  frozen.names = {"frozen"};
  frozen.shape = {0, 4};
  frozen.dtype = c10::kBFloat16;
  frozen.trainable = false;
  frozen.states["param"] = {};
  manifest.parameters.push_back(frozen);
  manifest.buffers.push_back({"mean", {2}, 2, c10::kLong, {{rank_file_name(0, 3), "buffer/mean", 0, 2, 1}}});
  return manifest;
}

// With its checksum put right, as a stranger would.
std::string changed(const std::function<void(Json&)>& change) {
  Json json = Json::parse(full().to_text());
  change(json);
  json.erase("checksum");
  std::string text = "{\"checksum\": \"0000000000000000\"," + json.dump().substr(1);
  return text.replace(14, 16, checksum_text(checksum(std::as_bytes(std::span(text)))));
}

std::string error_of_text(const std::string& text) {
  return error_of([&] { Manifest::from_text(text, "dir/manifest.json"); });
}

TEST(Manifest, ComesBackFromItsText) {
  const std::string text = full().to_text();
  const Manifest back = Manifest::from_text(text, "manifest.json");
  EXPECT_EQ(back.to_text(), text);
  EXPECT_EQ(back.lr, full().lr);
  EXPECT_EQ(back.window->weight, 2.5);
  EXPECT_EQ(back.client_state, full().client_state);
  EXPECT_EQ(back.parameters[0].states.at("master").size(), 3U);
  EXPECT_EQ(back.parameters[1].numel, 0);
  EXPECT_EQ(back.files[2].checksum, 0xfedcba9876543212u);
  EXPECT_EQ(error_of_text(changed([](Json&) {})), "");
}

TEST(Manifest, AnyByteThatChangesIsFound) {
  const std::string text = full().to_text();
  for (std::size_t at = 0; at < text.size(); at += 7) {
    std::string other = text;
    other[at] = static_cast<char>(other[at] ^ 1);
    EXPECT_NE(error_of_text(other), "") << at << ": " << text.substr(at, 20);
    EXPECT_NE(error_of_text(text.substr(0, at)), "") << at;
  }
}

TEST(Manifest, SaysThatAFormatIsNewer) {
  const std::string error = error_of_text(changed([](Json& json) { json["version"] = 2; }));
  for (const char* part : {"dir/manifest.json", "version 2", "up to 1", "newer"})
    EXPECT_NE(error.find(part), std::string::npos) << error;
}

TEST(Manifest, RefusesWhatAStrangerMayWrite) {
  const auto piece = [](Json& json) -> Json& { return json["parameters"][0]["states"]["master"][1]; };
  const std::vector<std::pair<const char*, std::function<void(Json&)>>> changes{
      {"no manifest", [](Json& json) { json["format"] = "other"; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = "../secret.safetensors"; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = "/etc/passwd"; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = ".."; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = ".hidden"; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = "a\\b"; }},
      {"plain file name", [&](Json& json) { piece(json)["file"] = std::string("a\0b", 3); }},
      {"plain file name", [](Json& json) { json["files"][0]["name"] = "a/b"; }},
      {"is not listed", [&](Json& json) { piece(json)["file"] = "other.safetensors"; }},
      {"is listed twice", [](Json& json) { json["files"][1]["name"] = json["files"][0]["name"]; }},
      {"is listed twice", [](Json& json) { json["parameters"][1]["names"] = {"tied.p"}; }},
      {"is listed twice", [](Json& json) { json["buffers"][0]["name"] = "p"; }},
      {"leaves a gap", [&](Json& json) { piece(json)["begin"] = 4; }},
      {"is no range", [&](Json& json) { piece(json)["end"] = 1; }},
      {"whole number", [&](Json& json) { piece(json)["end"] = std::uint64_t{1} << 63; }},
      {"whole number", [&](Json& json) { piece(json)["begin"] = -3; }},
      {"whole number", [&](Json& json) { piece(json)["begin"] = 3.0; }},
      {"of 10 elements", [](Json& json) { json["parameters"][0]["states"]["master"].erase(2); }},
      {"too many elements",
       [](Json& json) {
         json["parameters"][0]["shape"] = {1ll << 32, 1ll << 32};
       }},
      {"lacks the weights", [](Json& json) { json["parameters"][0]["trainable"] = false; }},
      {"has no name", [](Json& json) { json["parameters"][0]["names"] = Json::array(); }},
      {"element type", [](Json& json) { json["parameters"][0]["dtype"] = "F33"; }},
      {"is no checksum", [&](Json& json) { piece(json)["checksum"] = "12"; }},
      {"none of mean", [](Json& json) { json["window"]["scaling"] = "median"; }},
      {"whole number", [](Json& json) { json["world"] = 0; }},
      {"whole number", [](Json& json) { json["stage"] = 4; }},
      {"has no counters", [](Json& json) { json.erase("counters"); }},
      {"is no array", [](Json& json) { json["parameters"] = 3; }},
      {"is no object", [](Json& json) { json["counters"] = 3; }},
      {"is no text", [](Json& json) { json["tag"] = 3; }},
      {"is no number", [](Json& json) { json["lr"][0] = "x"; }},
  };
  for (const auto& [part, change] : changes) {
    const std::string error = error_of_text(changed(change));
    EXPECT_NE(error.find(part), std::string::npos) << part << ": " << error;
    EXPECT_NE(error.find("dir/manifest.json"), std::string::npos) << error;
  }
  EXPECT_NE(error_of_text(std::string(1'000'000, '[')).find("nested too deeply"), std::string::npos);
  EXPECT_NE(error_of_text("{\"tag\":1,\"tag\":2}").find("stands twice"), std::string::npos);
}

TEST(Manifest, WritesNoNamesThatJsonCannotHold) {
  Manifest manifest = full();
  manifest.parameters[0].names = {"\xff"};
  EXPECT_NE(error_of([&] { manifest.to_text(); }), "");
}

TEST(PlainName, IsOneFolderEntry) {
  for (const char* good : {"a", "global_step10", "rank-00000-of-00002.safetensors", "a b", "ä"})
    EXPECT_TRUE(is_plain_name(good)) << good;
  for (const std::string& bad : {std::string(), std::string("."), std::string(".."), std::string("a/b"),
                                 std::string("/"), std::string("a\\b"), std::string("a\0b", 3), std::string(201, 'a')})
    EXPECT_FALSE(is_plain_name(bad)) << bad;
}

}  // namespace
}  // namespace ballast::ckpt

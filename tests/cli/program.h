#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/data/temporary_folder.h"

namespace ballast::cli {

/// How a command ended, as a user meets it.
struct Outcome {
  int status = -1;
  std::string output;  // both streams
};

inline Outcome shell(const std::string& command) {
  Outcome outcome;
  std::FILE* pipe = ::popen(("exec 2>&1; export OMP_NUM_THREADS=1; " + command).c_str(), "r");
  std::array<char, 4096> part{};
  while (const std::size_t size = std::fread(part.data(), 1, part.size(), pipe))
    outcome.output.append(part.data(), size);
  const int status = ::pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

inline const std::string kProgram = BALLAST_PROGRAM;

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The built program in a folder with a text and a run file.
class Program : public testing::Test {
 protected:
  Program() {
    std::string text;
    for (int i = 0; text.size() < 9000; ++i)
      text.append("x").append(std::to_string(i % 13)).append(" = f(").append(std::to_string(i)).append(")\n");
    folder_.write("text/a.py", text);
    folder_.write("run.json", R"({
      "engine": {"train_micro_batch_size_per_gpu": 2, "managed_gradient_accumulation": false, "steps_per_print": 2,
                 "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
                 "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
      "model": {"layers": 1, "width": 16, "heads": 2, "context": 32},
      "data": {"path": "text", "held_out": 0.1},
      "train": {"steps": 6, "window": [1, 3], "eval_every": 4, "device": "cpu"}})");
  }
  Outcome ballast(const std::string& words) {
    return shell("cd " + folder_.path().string() + "; " + kProgram + " " + words);
  }
  /// Two ranks as a launcher starts them, one after the other. meanwhile: of the shell, with their ids in $zero and
  /// $one. Their exit statuses are the output's last line: "statuses 0 0", of rank 1 first.
  Outcome two_ranks(const std::string& words, const std::string& meanwhile = "true") {
    return shell("cd " + folder_.path().string() +
                 "; port=$(python3 -c 'import socket; s = socket.socket(); s.bind((\"127.0.0.1\", 0)); "
                 "print(s.getsockname()[1])'); export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port; words='" +
                 words + "'; RANK=1 LOCAL_RANK=1 " + kProgram + " $words & one=$!; RANK=0 LOCAL_RANK=0 " + kProgram +
                 " $words & zero=$!; " + meanwhile + "; wait $one; a=$?; wait $zero; b=$?; echo statuses $a $b");
  }
  std::string content(const std::string& file) {
    std::ostringstream text;
    text << std::ifstream(folder_.path() / file).rdbuf();
    return text.str();
  }
  data::TemporaryFolder folder_;
};

// The numbers of a run that don't depend on time or on how it went: by line.
inline std::vector<std::string> figures(const std::string& jsonl) {
  std::vector<std::string> lines;
  std::istringstream text(jsonl);
  for (std::string line; std::getline(text, line);) {
    nlohmann::json row = nlohmann::json::parse(line);
    for (const char* other : {"seconds", "tokens_per_second", "device_peak", "host_peak"}) row.erase(other);
    lines.push_back(row.dump());
  }
  return lines;
}

}  // namespace ballast::cli

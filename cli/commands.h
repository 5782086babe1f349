#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "cli/hugging_face.h"
#include "cli/run_file.h"
#include "cli/trace.h"

/// What the verbs of the command line do. Each returns the exit status and throws what goes wrong; main.cpp parses, and
/// prints errors.
namespace ballast::cli {

inline constexpr int kExitInterrupted = 130;  // as a shell reports an end by Ctrl-C

/// Trains, evaluates, generates; writes metrics.csv, metrics.jsonl, config.json and sample.txt into the run's folder,
/// the trace where one is asked for, and checkpoints. resume: "" for a new run, else as find_resume_point takes it.
/// init: weights to start from, checked against run.model; null: random ones.
int train(RunFile run, const TraceOptions& trace = {}, const std::string& resume = "", WeightSource* init = nullptr);

/// Prints what a rank's memory will hold, by kind and tier, and what each stage and placement would change. ranks: 0
/// for as many as were launched. with_engine: runs every stage and placement for two windows (on the launched ranks),
/// and prints what the engine's ledger saw beside the formula.
int estimate(const RunFile& run, int ranks, bool with_engine);

/// Prints a configuration's notices and effective values. file: a run's, or an engine's configuration alone.
int check_config(const std::filesystem::path& file, const std::vector<std::string>& changes);

/// Prints what a checkpoint holds; with names, each parameter too. path: a folder of checkpoints (its latest) or one of
/// them.
int inspect_checkpoint(const std::filesystem::path& path, bool names);
/// Reads all of it and compares checksums.
int verify_checkpoint(const std::filesystem::path& path);
/// Writes a checkpoint's weights as Hugging Face's libraries read them. to: a folder that doesn't exist yet. model: of
/// the checkpoint, for one that doesn't say so itself.
int export_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to, const ExportOptions& how,
                      const std::optional<models::GptOptions>& model);
/// Writes what Hugging Face's libraries have written as the checkpoint to/imported, without states of an optimizer.
int import_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to);

/// Prints the versions and devices that this build has found.
int info();

}  // namespace ballast::cli

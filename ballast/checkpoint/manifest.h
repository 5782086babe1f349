#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace ballast::ckpt {

/// Elements [begin, end) of a flattened tensor, as one tensor of a file.
struct Piece {
  std::string file, tensor;
  std::int64_t begin = 0, end = 0;
  std::uint64_t checksum = 0;  // of its bytes
};
using Pieces = std::vector<Piece>;  // in order, together the whole tensor

/// One parameter, whichever ranks and units held it.
struct ParameterRecord {
  std::vector<std::string> names;  // dotted; more than one where the module ties it
  std::vector<std::int64_t> shape;
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;  // in which forward and backward saw it
  bool trainable = true;
  std::int64_t steps = 0;  // its updates so far
  bool fresh = true;       // nothing has been put into its moments yet
  /// "master" (trainable) or "param" (frozen); the optimizer's states by their names; "gradient" where a window was
  /// pending and is kept.
  std::map<std::string, Pieces> states;
};

struct BufferRecord {
  std::string name;
  std::vector<std::int64_t> shape;
  std::int64_t numel = 0;
  c10::ScalarType dtype = c10::kFloat;
  Pieces pieces;
};

/// A window that wasn't over: its sum of gradients over all ranks is each parameter's "gradient".
struct WindowRecord {
  bool managed = true;                            // the engine counted micro-batches
  std::int64_t micro_batches = 0, backwards = 0;  // most of any rank
  std::int64_t since_step = 0;                    // backwards behind the last step()
  double weight = 0;                              // sum over all ranks
  std::string scaling;                            // "mean", "sum" or "weighted"
};

struct FileRecord {
  std::string name;
  std::int64_t bytes = 0;
  std::uint64_t checksum = 0;  // file_checksum
};

/// Everything that a checkpoint holds and where it lies, as "manifest.json". docs/checkpoint_format.md describes it.
struct Manifest {
  static constexpr int kVersion = 1;
  static constexpr const char* kFile = "manifest.json";
  static constexpr std::int64_t kMostBytes = std::int64_t{1} << 30;

  std::string tag;
  std::string run;   // new_run() of the run that saved it, and of those that went on from it; "" where it doesn't say
  double saved = 0;  // when, in seconds since 1970; 0 where it doesn't say
  int world = 1, stage = 0;
  std::string compute_dtype;      // of the configuration: "fp32", "bf16", "fp16"
  std::string optimizer;          // its type
  std::vector<std::string> keys;  // names of its states
  std::map<std::string, std::int64_t> counters;
  double loss_scale = 1;
  std::map<std::string, std::int64_t> loss_scaler;
  std::string scheduler;            // its type and parameters, as text to compare
  std::int64_t schedule_steps = 0;  // applied steps since it began
  std::vector<double> lr;           // by parameter group, of the next applied step
  std::optional<WindowRecord> window;
  std::vector<std::map<std::string, Piece>> rng;  // by rank: state of each generator, bytes
  nlohmann::json client_state;
  std::vector<FileRecord> files;
  std::vector<ParameterRecord> parameters;
  std::vector<BufferRecord> buffers;

  /// The text of the file, its own checksum included.
  std::string to_text() const;
  /// IoError with the file's name: not a manifest, a newer version, a wrong checksum, a value out of its range, a
  /// tensor whose pieces leave a gap or overlap, a file name that would lead out of the folder.
  static Manifest from_text(const std::string& text, const std::string& file);
};

/// What tells a run from others: 16 random hexadecimal digits.
std::string new_run();

/// Can be the name of a file in a checkpoint's folder, or of the folder itself: no path, not hidden, at most 200 bytes.
bool is_plain_name(const std::string& name);

}  // namespace ballast::ckpt

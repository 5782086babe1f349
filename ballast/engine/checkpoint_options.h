#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ballast {

struct SaveOptions {
  /// A window that isn't over is saved too: the sum of its gradients so far. Else the file has none, and a warning
  /// counts what a load will miss; the running engine's window stays as it is either way.
  bool include_window = false;
  /// save_checkpoint returns when it has copied this rank's states to host memory (as many bytes as its file will
  /// have), and they are written behind the training. Errors come with the next call of save_checkpoint,
  /// load_checkpoint, step or synchronize; at most one such save is under way.
  bool asynchronous = false;
  /// Of this run's checkpoints with a default tag (those of the engine, and of the run that it went on from) this many
  /// are kept, older ones removed once the new one stands; 0: all. Other runs' are left alone.
  int keep_last = 0;
  /// The program's own state, a JSON document: load_checkpoint gives it back on all ranks. Rank 0's is saved.
  std::string client_state;
  /// What keeps this rank from saving, where its program has found something: all ranks throw it as a UseError. "": it
  /// saves.
  std::string refusal;
};

struct LoadOptions {
  /// Parameters and buffers, nothing else: counters, learning rates and the optimizer stay as they are.
  bool weights_only = false;
  bool load_optimizer = true;  // moments, step counts, the loss scale
  bool load_scheduler = true;  // else the schedule begins anew
  /// Every parameter and buffer of the module is in the checkpoint with its shape, every one there is in the module,
  /// and the optimizer is of the same type: else UseError, with all names. Not strict: what fits is loaded.
  bool strict = true;
};

/// What load_checkpoint found. Equal on all ranks.
struct LoadReport {
  std::string tag;
  std::string client_state;             // as it was saved; "" where none was
  std::vector<std::string> missing;     // names of the module that the checkpoint hasn't; their values stay
  std::vector<std::string> unexpected;  // names there that the module hasn't
  std::vector<std::string> misshaped;   // names of both with other shapes; their values stay
  bool window = false;                  // a window that was pending at the save goes on
};

}  // namespace ballast

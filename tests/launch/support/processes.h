#pragma once

#include <map>
#include <string>
#include <vector>

namespace ballast::testing {

using Variables = std::map<std::string, std::string>;

/// How a child ended.
struct Ended {
  int exit_code = 0;   // a signal's number, negative, where one ended it
  bool hung = false;   // still running when the limit had passed: killed then
  std::string output;  // its standard error
};

/// Ranks as processes: this program, started once more for each rank, plays a scenario there instead of running tests.
class Processes {
 public:
  explicit Processes(std::string scenario);
  ~Processes();  // kills those that were not joined
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  /// Starts a child with these variables on top of this process's own.
  void start(const Variables& variables);
  /// Starts `size` children as torchrun would on one machine, each with `variables` too.
  void start_all(int size, const Variables& variables = {});
  /// Waits for the child that was started as number `index`; a minute or two at most.
  Ended join(int index);
  std::vector<Ended> join();  // all, in the order in which they were started

 private:
  struct Child {
    int pid;
    int error_output;
    bool joined = false;
  };
  std::string scenario_;
  std::vector<Child> children_;
};

/// What torchrun sets for one rank of a machine.
Variables torchrun(int rank, int size, const std::string& port);

/// Holds a TCP port as a listener that is no rendezvous.
class Listener {
 public:
  Listener();
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;
  std::string port() const;

 private:
  int socket_;
};

/// A port that nobody used a moment ago.
std::string free_port();

// ---- for the children ----

/// Makes a scenario known under a name. It returns the exit code; what it throws goes to standard error as
/// "rank N: text", with exit code 1.
struct Scenario {
  Scenario(const char* name, int (*play)());
};

/// A variable that the test gave to start(); the program ends if there is none.
std::string variable(const char* name);

}  // namespace ballast::testing

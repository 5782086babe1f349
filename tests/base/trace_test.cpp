#include "ballast/base/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "ballast/base/error.h"
#include "ballast/base/log.h"
#include "ballast/base/trace_json.h"

namespace ballast::trace {
namespace {

using Json = nlohmann::json;
using std::chrono::microseconds;
using std::chrono::nanoseconds;

class Trace : public testing::Test {
 protected:
  ~Trace() override {
    stop();
    std::filesystem::remove(file_);
  }
  Json written(int rank = 0) {
    write(file_, rank);
    return Json::parse(std::ifstream(file_));
  }
  /// "row: name [ts, ts + dur]" of each span, in the file's order.
  static std::vector<std::string> spans(const Json& trace) {
    std::map<int, std::string> rows;
    std::vector<std::string> found;
    for (const Json& event : trace["traceEvents"]) {
      if (event["ph"] == "M" && event["name"] == "thread_name") rows[event["tid"]] = event["args"]["name"];
      if (event["ph"] != "X") continue;
      std::ostringstream text;
      text << rows.at(event["tid"]) << ": " << event["name"].get<std::string>() << " [" << event["ts"] << ", "
           << event["dur"] << "]";
      found.push_back(text.str());
    }
    return found;
  }
  static void add_at(Lane lane, const char* what, std::string_view which, int begin, int end) {
    add(lane, what, which, {started() + microseconds(begin), started() + microseconds(end)});
  }
  const std::filesystem::path file_ =
      std::filesystem::temp_directory_path() / ("ballast-trace-" + std::to_string(::getpid()) + ".json");
};

using Lines = std::vector<std::string>;

TEST_F(Trace, WritesSpansOfAllLanesInTheirOrderWithTimesFromTheStart) {
  start();
  add(Lane::kDisk, "read chunk", "3", {started() + nanoseconds(1500), started() + nanoseconds(4001)});
  add_at(Lane::kCompute, "forward", "", 10, 40);
  add_at(Lane::kCompute, "backward", "", 40, 90);
  const Json trace = written(3);
  EXPECT_EQ(spans(trace), (Lines{"compute: forward [10.0, 30.0]", "compute: backward [40.0, 50.0]",
                                 "disk: read chunk 3 [1.5, 2.501]"}));
  for (const Json& event : trace["traceEvents"]) EXPECT_EQ(event["pid"], 3);
  EXPECT_EQ(trace["traceEvents"][0]["args"]["name"], "rank 3");
  EXPECT_EQ(trace["otherData"], Json::parse(R"({"spans": 3, "spans_left_out": 0})"));
}

TEST_F(Trace, SpansThatOverlapShareALaneInSeveralRows) {
  start();
  add_at(Lane::kGather, "b", "", 5, 15);
  add_at(Lane::kGather, "a", "", 0, 10);
  add_at(Lane::kGather, "in a", "", 0, 4);
  add_at(Lane::kGather, "c", "", 12, 20);
  add_at(Lane::kGather, "d", "", 13, 14);
  EXPECT_EQ(spans(written()), (Lines{"gather: a [0.0, 10.0]", "gather: in a [0.0, 4.0]", "gather: c [12.0, 8.0]",
                                     "gather: d [13.0, 1.0]", "gather 2: b [5.0, 10.0]"}));
}

TEST_F(Trace, NamesAreEscaped) {
  EXPECT_EQ(json_string("a\"b\\c\n\x01"), R"("a\"b\\c\u000a\u0001")");
  EXPECT_EQ(json_string("gr\xc3\xb6\xc3\x9f"
                        "e \xe2\x82\xac \xf0\x9f\x9a\x80"),
            "\"gr\xc3\xb6\xc3\x9f"
            "e \xe2\x82\xac \xf0\x9f\x9a\x80\"");
  // Cut short, a stray follower, overlong, a surrogate, beyond the last code point.
  EXPECT_EQ(json_string("\xc3"), R"("\ufffd")");
  EXPECT_EQ(json_string("\x80x"), R"("\ufffdx")");
  EXPECT_EQ(json_string("\xc0\xaf"), R"("\ufffd\ufffd")");
  EXPECT_EQ(json_string("\xed\xa0\x80"), R"("\ufffd\ufffd\ufffd")");
  EXPECT_EQ(json_string("\xf4\x90\x80\x80"), R"("\ufffd\ufffd\ufffd\ufffd")");
  start();
  add_at(Lane::kGather, "gather", "my \"unit\"\\\t\xff", 0, 1);
  EXPECT_EQ(spans(written()), (Lines{"gather: gather my \"unit\"\\\t\xef\xbf\xbd [0.0, 1.0]"}));
}

TEST_F(Trace, RecordsOnlyWhatBeginsWhileOn) {
  { const Span span(Lane::kCaller, "before"); }
  start();
  {
    const Span span(Lane::kCaller, "step", "7");
    const Mark mark = Mark::now();
    mark.end(Lane::kReduce, "reduce", "unit");
  }
  {
    const Span over_the_end(Lane::kCallerWaits, "host");
    stop();
  }
  { const Span span(Lane::kCaller, "after"); }
  Mark().end(Lane::kCaller, "none");
  Mark::now().end(Lane::kCaller, "off");
  Lines names;
  const Json trace = written();
  for (const Json& event : trace["traceEvents"])
    if (event["ph"] == "X") names.push_back(event["name"]);
  EXPECT_EQ(names, (Lines{"step 7", "host", "reduce unit"}));
}

TEST_F(Trace, AStartForgetsWhatWasBegunBefore) {
  start();
  const Mark old = Mark::now();
  add_at(Lane::kCaller, "old", "", 0, 1);
  start();
  old.end(Lane::kCaller, "begun before");
  add_later(Lane::kCompute, "of before", "", [at = started()] { return Interval{at - nanoseconds(1), at}; });
  add_at(Lane::kCaller, "new", "", 0, 1);
  const Json trace = written();
  EXPECT_EQ(spans(trace), (Lines{"caller: new [0.0, 1.0]"}));
  EXPECT_EQ(trace["otherData"]["spans"], 1);
}

TEST_F(Trace, ADeviceIsAskedForItsTimesWhenTheTraceIsWritten) {
  start();
  bool asked = false;
  add_later(Lane::kCompute, "backward", "", [&asked, begin = started()] {
    asked = true;
    return Interval{begin + microseconds(3), begin + microseconds(5)};
  });
  stop();
  EXPECT_FALSE(asked);
  EXPECT_EQ(spans(written()), (Lines{"compute: backward [3.0, 2.0]"}));
}

TEST_F(Trace, ThreadsRecordTogether) {
  constexpr int kThreads = 4, kSpans = 1000;
  start();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([t] {
      const std::string name = std::to_string(t);
      for (int i = 0; i < kSpans; ++i) const Span span(Lane::kHostAdd, "thread", name);
    });
  for (std::thread& thread : threads) thread.join();
  std::map<std::string, int> counts;
  const Json trace = written();
  for (const Json& event : trace["traceEvents"])
    if (event["ph"] == "X") ++counts[event["name"]];
  EXPECT_EQ(counts, (std::map<std::string, int>{
                        {"thread 0", kSpans}, {"thread 1", kSpans}, {"thread 2", kSpans}, {"thread 3", kSpans}}));
}

TEST_F(Trace, HoldsNoMoreThanItMayAndSaysSo) {
  Lines log;
  set_log_sink([&](LogLevel, const std::string& line) { log.push_back(line); });
  start(/*most=*/2);
  for (int i = 0; i < 5; ++i) add_at(Lane::kDisk, "read", std::to_string(i), i, i + 1);
  const Json trace = written();
  set_log_sink({});
  EXPECT_EQ(spans(trace), (Lines{"disk: read 0 [0.0, 1.0]", "disk: read 1 [1.0, 1.0]"}));
  EXPECT_EQ(trace["otherData"]["spans_left_out"], 3);
  ASSERT_EQ(log.size(), 1u);
  EXPECT_EQ(log[0], "the trace is not whole: 3 spans came after the 2 that it may hold (" + file_.string() +
                        "; record fewer steps)");
  start();  // a new recording has its room again
  add_at(Lane::kDisk, "read", "5", 0, 1);
  EXPECT_EQ(written()["otherData"], Json::parse(R"({"spans": 1, "spans_left_out": 0})"));
}

TEST_F(Trace, AFileThatCantBeWrittenIsAnError) {
  start();
  EXPECT_THROW(write("/nowhere/trace.json", 0), IoError);
  EXPECT_FALSE(on());
}

}  // namespace
}  // namespace ballast::trace

